"""Tools that inspect, compare and recycle prompts."""
