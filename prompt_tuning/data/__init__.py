"""From files to batches on the host: tokens, rows, examples, the plan, the batch."""
