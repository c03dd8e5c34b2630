"""Write a model as a GGUF file for llama.cpp."""
