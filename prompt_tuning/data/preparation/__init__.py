"""Prepares training data: text files become HDF5 files of token ids and types.

Terms used throughout the package and in the help of `prompt-tuning prepare`:

  record: one entry of an input file: a line of JSON or text, or a row of a table.
  turn: one prompt and its completion; a record has one or more.
  example: the token ids and types that are packed as a unit: a whole record, or one of
    its turns (`packing_boundary`). The keys of `metrics.json` and the parameter
    `DataSource.separate_articles` call it an article.
  sequence: one row of an HDF5 file; all sequences have the same length and hold one or
    more examples, or parts of them, followed by padding.
"""
