"""Continuing rows of tokens: the next-token loop, and the choices it makes."""
