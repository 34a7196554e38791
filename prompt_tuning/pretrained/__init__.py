"""A frozen model opened from a checkpoint, with prompts and adapters attached."""
