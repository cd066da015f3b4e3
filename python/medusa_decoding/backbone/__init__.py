"""The model that the heads sit on: its layers run over a KV cache, with the attention modules swapped."""
