"""Evaluation on held-out data: metrics, their intervals, and predictions."""
