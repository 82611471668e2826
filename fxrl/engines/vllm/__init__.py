"""vLLM inside the trainer's process; only ``door.py`` imports it."""
