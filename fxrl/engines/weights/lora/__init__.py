"""A LoRA adapter's way into an engine: folded, in vLLM's slots, or merged."""
