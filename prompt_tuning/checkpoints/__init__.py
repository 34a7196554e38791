"""Reads frozen models, and writes and reads the checkpoints of runs.

`formats` opens the files of a frozen model as stored tensors without reading them, and
`families` describes how to make our parameters from these. `restore_plan` plans,
reports, and reads. `run_store` has the checkpoints of a run.
"""
