"""Pipelines: a model in stages, with a backward pass in one part or two."""
