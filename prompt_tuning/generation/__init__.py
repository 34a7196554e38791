"""Text generation: the decoding loop, sampling, and batching of rows."""
