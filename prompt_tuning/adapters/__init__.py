"""Trained parameters as files: read, merged into weights, converted."""
