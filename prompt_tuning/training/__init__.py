"""From a frozen model and batches to a tuned prompt."""
