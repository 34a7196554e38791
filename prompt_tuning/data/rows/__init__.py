"""Reads rows from files and Python objects, e.g. jsonl, tables, HDF5, Parquet."""
