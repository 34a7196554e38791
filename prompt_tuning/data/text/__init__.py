"""Tokenizers and prompt templates."""
