"""Splits a run among devices and processes: meshes, axis rules, collectives.

See `README.md` in this folder for how to start and configure such runs.
"""
