"""Uses what a run trained: loads, compares, combines and exports it.

`load_tuned` opens a run for `pt.load_tuned`, and `adapter_conversion` is the command
`convert`.
"""
