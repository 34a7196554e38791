"""File formats of the checkpoints of frozen models."""
