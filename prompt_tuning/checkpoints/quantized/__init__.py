"""Quantized weights that others have published, which are widened when they are read.

Each method of quantization has a module that replaces the stored integers by tensors
that read as float32, so that nothing above knows how a folder was stored. Hold them in
few bits again with `Pretrained.parameter_dtype`, e.g. "nf4" for a folder of NF4.
"""
