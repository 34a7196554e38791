"""An HTTP server with OpenAI's protocol on top of the decoding engine.

`application` has the routes, `openai_requests` and `openai_answers` the protocol, and
`engine_thread` runs the engine.
"""
