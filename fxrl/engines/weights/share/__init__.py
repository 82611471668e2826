"""One copy of the weights for vLLM and the trainer."""
