"""Train prompts and adapters: open a run, step, log, evaluate and save.

Read `opening`, `loop` and `step`, in this order.
"""
