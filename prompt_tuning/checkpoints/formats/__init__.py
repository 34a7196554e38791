"""File formats of frozen models, e.g. safetensors: opens files as stored tensors."""
