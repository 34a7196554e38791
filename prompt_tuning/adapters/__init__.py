"""Reads and writes adapters as files, converts them from and to PEFT, and merges them.

Start with `adapter.Adapter`, an adapter in memory. `peft` has all that knows PEFT's
folders, `prompt_files` single arrays, and `merge` puts LoRA and IA3 into the weights.
"""
