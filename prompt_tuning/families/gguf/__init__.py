"""GGUF files (llama.cpp), read as the Hugging Face folders that they were made from."""
