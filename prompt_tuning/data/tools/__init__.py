"""Tools that display and rewrite data files."""
