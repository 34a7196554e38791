"""Turns files into batches on the host: rows, then examples, then padded batches.

`rows` reads files, `text` encodes texts, `examples` finds what is learned in a row, and
`batching` plans and pads batches. `preparation` is `prompt-tuning prepare`.
"""
