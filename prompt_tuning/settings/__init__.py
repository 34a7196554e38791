"""Plain dataclasses of the settings that the command line has options for.

They import neither JAX nor NumPy, so that `--help` is instant. The code that uses them
is in the room of the topic, e.g. `data.source_reading` for `DataSource`.
"""
