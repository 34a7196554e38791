"""An HTTP server that speaks OpenAI's protocol over the decoding engine."""
