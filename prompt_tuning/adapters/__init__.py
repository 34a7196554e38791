"""Adapters as files: read, converted to and from PEFT, and merged into weights."""
