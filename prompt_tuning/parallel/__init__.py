"""One program on any mesh."""
