"""Inspects, compares and recycles prompts."""
