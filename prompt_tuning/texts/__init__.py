"""Continues texts and conversations: the room above `decoding`.

`texts.Texts` is the front for the command, the server and Python. Each
`loaded_adapter.LoadedAdapter` has its own template and chat template.
"""
