"""Prepares training data: text files become HDF5 files of token ids and types.

The package and the help of `prompt-tuning prepare` use these terms:

  record: one entry of an input file, e.g. a line of JSON or a row of a table.
  turn: one prompt and its completion; a record has one or more.
  example: the token ids and types that are packed as a unit: a whole record, or a turn
    (`packing_boundary`). The keys of `metrics.json` and the parameter
    `DataSource.separate_articles` call it an article.
  sequence: one row of an HDF5 file. All sequences have the same length and hold
    examples, or parts of them, followed by padding.
"""
