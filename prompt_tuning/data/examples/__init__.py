"""Rows cut into examples."""
