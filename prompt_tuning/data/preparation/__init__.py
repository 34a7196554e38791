"""From files of text to HDF5 files of token ids and types."""
