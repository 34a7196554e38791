"""An HTTP server that speaks OpenAI's protocol over the decoding engine.

`application` has the routes, `openai_requests` and `openai_answers` the protocol, and
`engine_thread` runs the engine.
"""
