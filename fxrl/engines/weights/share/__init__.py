"""One copy of the weights for vLLM and the trainer."""

from fxrl.engines.weights.share.binder import share
from fxrl.engines.weights.share.report import SharingError, SharingReport, SharingRow

__all__ = ["SharingError", "SharingReport", "SharingRow", "share"]
