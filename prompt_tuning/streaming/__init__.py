"""Models larger than the device: blocks whose weights are brought in one by one.

A program is traced as ever and then cut at its loops over layers: what lies between
them is compiled whole, one layer of a loop is compiled once, and Python walks over the
layers, forth and back, while a thread reads the next one (`loops`, `program`,
`weights`). Nothing in the models knows of it.
"""
