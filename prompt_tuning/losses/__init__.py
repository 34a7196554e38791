"""What is asked of the model: token weights and the cross-entropy they multiply."""
