"""Splits a run among devices and processes: meshes, axis rules, collectives.

To start and configure such runs, see `README.md` in this folder.
"""
