"""Quantized weights published by others.

Each quantization method has a module that replaces the stored integers by tensors that
read as float32, so nothing above needs to know how a folder was stored. If a store of
`core.quantization` can hold the integers exactly, the tensors also have them, as
`Codes`.
"""
