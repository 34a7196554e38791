"""Quantized weights that others have published.

Each method of quantization has a module that replaces the stored integers by tensors
that read as float32, so that nothing above needs to know how a folder was stored.
Where a store of `core.quantization` holds the integers exactly, the tensors also have
these, as `Codes`.
"""
