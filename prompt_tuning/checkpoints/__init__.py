"""Checkpoints of frozen models and of runs.

`formats` opens the files of a frozen model as stored tensors without reading them;
`families` describes how our parameters are made from these; `restore_plan` plans,
reports and reads. `run_store` writes and reads the checkpoints of a run.
"""
