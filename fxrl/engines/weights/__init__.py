"""How the trainer's weights get into an engine: shared storages, LoRA, copies."""
