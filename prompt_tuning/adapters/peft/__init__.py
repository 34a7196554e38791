"""PEFT's folders and names, translated to our adapters and back."""
