"""Measure a model on held-out data: metrics, their intervals, and predictions.

Start with `evaluator.Evaluator`; `settings.evaluation_settings.Evaluation` selects what
to measure.
"""
