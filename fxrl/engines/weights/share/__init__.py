"""One copy of the weights for vLLM and the trainer."""

from fxrl.engines.weights.share.binder import SharingError, SharingReport, SharingRow, share

__all__ = ["SharingError", "SharingReport", "SharingRow", "share"]
