"""Uses of trained prompts and adapters: loading, comparison, ensembles, export."""
