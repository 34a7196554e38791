"""Foundations for all other rooms, e.g. errors, masks, dropout, atomic files.

This room imports nothing else from the package.
"""
