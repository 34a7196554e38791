"""A run's own checkpoints."""
