"""The decoding engine: slots that rows join and leave, each with its settings."""
