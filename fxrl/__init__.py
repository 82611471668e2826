"""fxrl: any model, any PyTorch RL loss, rewritten into a train step that fits and flies."""

__version__ = "0.1.0"
