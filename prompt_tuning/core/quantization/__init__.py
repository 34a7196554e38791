"""Frozen kernels in eight or four bits, and the one product that reads them.

The projections of blocks and experts are quantized: they hold nearly all weights, and
only matrix products read them. Embedding tables and the head are quantized only if
`ModelConfig.quantized_tables` is set or they were published so. Norms, biases and
routers stay in bfloat16. Activations are never quantized.
"""
