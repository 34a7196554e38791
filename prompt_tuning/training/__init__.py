"""Trains prompts and adapters: opens a run, steps, logs, evaluates and saves.

Read `opening`, `loop` and `step`, in this order.
"""
