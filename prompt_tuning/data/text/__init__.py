"""Turns text into tokens: tokenizers, templates and chat templates."""
