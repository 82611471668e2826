"""Dynamo's rewritten bytecode as Python source, through depyf (optional)."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType
from typing import Any

from fxrl.capture._torch import cache_entries
from fxrl.errors import FxrlError

# Dynamo ends the names of compiled functions in a fresh UUID, which would spoil every diff.
_UUID = re.compile(r"_[0-9a-f]{8}(?:_[0-9a-f]{4}){3}_[0-9a-f]{12}")
_RESUME = "__resume_at_"


class DecompileError(FxrlError):
    """Bytecode cannot be shown as source: depyf is missing, or does not know the bytecode."""


def decompile(function: Callable[..., Any] | CodeType) -> str:
    """Python source of ``function`` or of a code object, ending in a newline.

    Raises:
        DecompileError: depyf is not installed, or fails on this code.
    """
    try:
        import depyf
    except ImportError as error:
        raise DecompileError(
            f"depyf is not installed ({error}), so Dynamo's bytecode is not decompiled; "
            "cure: pip install depyf"
        ) from error
    code = function if isinstance(function, CodeType) else _code_of(function)
    try:
        source = str(depyf.decompile(code))
    except Exception as error:  # depyf raises whatever its many bytecode handlers meet
        raise DecompileError(
            f"depyf cannot decompile {code.co_name}: {type(error).__name__}: {error}; "
            "cure: a depyf release that knows this Python version"
        ) from error
    return _UUID.sub("", source).rstrip("\n") + "\n"


def decompile_dynamo(function: Callable[..., Any]) -> dict[str, str]:
    """What Dynamo made of a function that ran under ``torch.compile``: file name -> source.

    One file for each compiled variant of ``function`` (``loss_fn.0.py``, ...) and of each
    function that resumes after a graph break. Empty if Dynamo has compiled nothing of it.

    Raises:
        DecompileError: as ``decompile``.
    """
    sources: dict[str, str] = {}
    todo: list[Callable[..., Any]] = [_plain(function)]
    seen: set[CodeType] = set()
    while todo:
        current = todo.pop(0)
        code = _code_of(current)
        if code in seen:
            continue
        seen.add(code)
        for index, entry in enumerate(cache_entries(code)):
            sources[f"{code.co_name.strip('<>')}.{index}.py"] = decompile(entry.code)
            todo += _resumed(current, entry.code)
    return sources


def _resumed(function: Callable[..., Any], code: CodeType) -> list[Callable[..., Any]]:
    """Functions that ``code`` jumps to after a graph break."""
    scope = getattr(function, "__globals__", {})
    return [scope[n] for n in code.co_names if n.startswith(_RESUME) and n in scope]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function under a ``torch.compile`` wrapper and a bound method."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    return getattr(function, "__func__", function)


def _code_of(function: Callable[..., Any]) -> CodeType:
    code = getattr(_plain(function), "__code__", None)
    if not isinstance(code, CodeType):
        raise DecompileError(
            f"{function!r} has no bytecode; cure: pass a Python function or a code object"
        )
    return code
