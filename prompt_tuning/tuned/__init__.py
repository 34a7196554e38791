"""Use what a run trained: load, compare, combine and export it.

`load_tuned` opens a run for `pt.load_tuned`; `adapter_conversion` is the command
`convert`.
"""
