"""Model families: their configs and the names of their stored parameters."""
