"""PEFT's folders and names, converted to our adapters and back."""
