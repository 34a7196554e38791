"""The Python interface: open a model, tune it, use what was tuned.

The names are public as `prompt_tuning.tune`, `prompt_tuning.Model` and so on.
"""
