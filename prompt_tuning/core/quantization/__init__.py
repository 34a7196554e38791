"""Frozen kernels in eight or four bits, and the one product that reads them.

The projections of the blocks and of experts are quantized: they hold nearly all
weights, and only matrix products read them. Embedding tables and the head are if
`ModelConfig.quantized_tables` is set, or if they are published so. Norms, biases and
routers stay in bfloat16. Activations are never quantized.
"""
