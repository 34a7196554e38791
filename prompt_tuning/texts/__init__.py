"""Texts and conversations in, texts out: the room above `decoding`."""
