"""Checkpoints that a run writes and resumes from."""
