"""Continue texts and conversations: the room above `decoding`.

The command line, the server and Python all use `texts.Texts`. Each
`loaded_adapter.LoadedAdapter` has its own template and chat template.
"""
