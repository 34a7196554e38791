"""GGUF files (llama.cpp), read like the Hugging Face folders they were made from."""
