"""File formats that checkpoints come in."""
