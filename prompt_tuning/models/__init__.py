"""The frozen language models: layers, attention, blocks, and the two stacks.

`decoder_only` and `encoder_decoder` are the plain models. `prompted` and `prefixed` add
prompts to them, and `build` makes one from its config.
"""
