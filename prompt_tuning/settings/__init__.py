"""The settings that the command line has options for, as plain dataclasses.

Importing them takes no JAX and no NumPy, so that help is instant. What reads them is in
the room that it is about, e.g. `data.source_reading` for `DataSource`.
"""
