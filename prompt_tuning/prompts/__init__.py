"""What is trained: prompts, how they start, and where they stand."""
