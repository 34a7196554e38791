"""Batches of examples and their order."""
