"""Checkpoints: reads frozen models, and writes and reads the checkpoints of a run.

`formats` opens the files of a frozen model as stored tensors without reading them.
`families` describes how to make our parameters from these tensors. `restore_plan`
plans, reports, and reads. `run_store` has the checkpoints of a run.
"""
