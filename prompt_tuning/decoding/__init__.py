"""The decoding engine: rows with unlike adapters and settings over one compiled step."""
