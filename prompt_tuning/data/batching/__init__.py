"""Puts examples into batches, in an order that each process and resumed run repeats."""
