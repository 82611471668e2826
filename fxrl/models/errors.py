"""Errors of finding, building and converting models."""

from __future__ import annotations

from fxrl.errors import FxrlError


class ModelError(FxrlError, ValueError):
    """A model id, path or configuration leads to no model; the message has the cure."""


class FetchError(FxrlError, RuntimeError):
    """A download, its verification or its conversion failed."""
