"""Adapters of PEFT: its folders, its names, and what they are in our terms."""
