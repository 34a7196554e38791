"""Settings of a run, and the gin files that they are read from."""
