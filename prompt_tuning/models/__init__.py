"""Frozen language models: layers, attention, blocks and the two kinds of stack.

Start with `decoder_only` or `encoder_decoder`, the plain models. `prompted` and
`prefixed` subclass them to add prompts, and `build.build_model` creates whichever one a
config asks for.

Some arguments mean the same everywhere: `key` is a random key for dropout, and None
disables dropout; `prefix` is the result of the model's `prefix` if it ran before;
`rows` describes the rows of text, of `text_length` `T`; `numbers` are the indices of
positions in the whole batch, so that dropout does not depend on the mesh.
"""
