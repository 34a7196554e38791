"""The frozen language models: layers, attention, blocks, stacks and the two families."""
