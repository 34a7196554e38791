"""Settings of a run, and the gin files that they are read from."""

CONFIG_FILE = "config.gin"
"""The config in a run directory."""
