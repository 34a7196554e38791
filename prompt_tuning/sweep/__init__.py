"""Sweeps: many prompts trained at once over one frozen model."""
