"""The Python interface: open a model, tune it, use the result.

`import prompt_tuning as pt` exports it: `pt.load`, `pt.tune`, `pt.Model` and so on.
"""
