"""Pipelines: train a model in stages, with a backward pass in one part or two.

Read `schedules` and `simulation` first: they are plain Python without JAX. `stages`
cuts a traced model, and `driver` runs the stages.
"""
