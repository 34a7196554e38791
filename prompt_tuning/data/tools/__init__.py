"""Shows and rewrites data files, for `prompt-tuning show` and `token-types`."""
