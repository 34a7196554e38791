"""Reads the settings of a run from gin files, options or Python.

`run.Run` lists the settings. `gin_files` reads configs, `flat_config` turns options
into configs, and `python_runs` does the same for the arguments of `pt.tune`.
"""
