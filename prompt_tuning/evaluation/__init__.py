"""What held-out data say of a prompt: metrics, their intervals, tables, predictions."""
