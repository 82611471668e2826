"""Errors of finding, building and converting models."""

from __future__ import annotations

import importlib
from typing import Any

from fxrl.errors import FxrlError


class ModelError(FxrlError, ValueError):
    """A model id, path or configuration leads to no model; the message has the cure."""


class MissingPackageError(FxrlError, ImportError):
    """An optional package is needed for what was asked."""


class FetchError(FxrlError, RuntimeError):
    """A download, its verification or its conversion failed."""


DEMO_CURE = "pip install 'fxrl[demo]'"
"""Installs transformers, peft, safetensors and gguf."""


def optional(package: str, purpose: str) -> Any:
    """Imports a package of the ``demo`` extra.

    Raises:
        MissingPackageError: it is not installed, or too old to be imported.
    """
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise MissingPackageError(
            f"{purpose} needs {package} ({missing}); {DEMO_CURE}"
        ) from missing
