"""Continue rows of token ids: an engine with slots that rows join and leave.

Call `continue_rows`, or `texts.continue_requests` for texts; they choose between the
engine, batches on a mesh, and streamed weights. `decoding_engine.DecodingEngine` is the
engine itself.
"""
