"""Uses of what a run trained: evaluation, ensembles, export."""
