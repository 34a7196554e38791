"""The command `prompt-tuning`."""
