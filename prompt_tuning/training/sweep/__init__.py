"""Sweeps: train many prompts together over one frozen model.

`sweep_run` starts or resumes a sweep; `training.loop` steps all members.
"""
