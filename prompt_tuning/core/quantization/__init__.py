"""Frozen kernels in eight or four bits, and the one product that reads them.

Only the projections of the blocks and of experts may be quantized: they hold nearly
all weights, and only matrix products read them. Embedding tables, the head, norms,
biases and routers stay in bfloat16. Activations are never quantized.
"""
