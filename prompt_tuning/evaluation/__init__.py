"""Measures a model on held-out data: metrics, their intervals, and predictions.

Start with `evaluator.Evaluator`. `evaluation_settings.Evaluation` says what to measure.
"""
