"""Rows of token ids, read from HDF5 and jsonl files."""
