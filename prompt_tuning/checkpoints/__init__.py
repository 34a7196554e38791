"""Checkpoints: reading frozen models, and what has become of each of their arrays.

`huggingface` and `t5x` open a checkpoint as stored arrays that nobody has read yet and
say how our parameters are made of them; `restore` plans, reports and reads.
"""
