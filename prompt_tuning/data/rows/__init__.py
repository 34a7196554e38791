"""Rows of token ids and types, read from files."""
