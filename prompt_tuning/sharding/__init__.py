"""Splits a run over devices and processes: meshes, axis rules, collectives.

`README.md` in this folder tells how to start and configure such runs.
"""
