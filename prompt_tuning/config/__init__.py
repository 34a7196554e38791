"""The configuration of a run, and gin, which fills it in."""
