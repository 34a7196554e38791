"""Models larger than the device: the weights of blocks come in one layer at a time.

A function is traced as usual, and its program is split at the loops over layers. The
segments between loops are compiled whole, and one layer of each loop is compiled once.
Python then runs the layers in order, forward and backward, while a thread reads the
next one (`traced_loops`, `traced_program`, `layered_weights`). The models need no
changes.
"""
