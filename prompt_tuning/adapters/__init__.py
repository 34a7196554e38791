"""Adapters as files: read and write them, convert them to and from PEFT, merge them.

Start with `adapter.Adapter`, an adapter in memory. `peft` knows PEFT's folders,
`prompt_files` files with a single array, and `merge` folds LoRA and IA3 into the
weights.
"""
