"""Adapts frozen language models in JAX by training a few kilobytes in front of them.

The package imports nothing by itself, so that the command's help is instant; import
what you need from its parts (`prompt_tuning.prompts`, `.models`, `.training`, ...).
"""

__version__ = "0.1.0"
