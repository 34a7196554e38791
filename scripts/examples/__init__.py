"""Examples of the Python interface; each runs in seconds on a bundled model."""
