"""Examples, and how rows are read as examples."""
