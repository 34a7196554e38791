"""Writes the checkpoints of a run, and finds and reads them to resume."""
