"""The frozen language models: layers, attention, blocks, stacks, families."""
