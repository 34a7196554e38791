"""Reads rows as examples: given tokens, learned tokens and their weights."""
