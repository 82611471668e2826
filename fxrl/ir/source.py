"""Where in the user's code a graph value was made."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Iterator
from functools import cache

from torch import fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_USER_LIKE = (f"{_OURS}losses{os.sep}", f"{_OURS}rl{os.sep}")
_LIBRARIES = ("torch", "transformers", "peft", "accelerate", "trl")


def user_source(node: fx.Node) -> str:
    """``"file.py:12"`` of the innermost user frame that made ``node``; empty if unknown.

    A frame is the user's when it lies neither in the standard library nor in an installed package
    (``site-packages``), nor in a source checkout of torch, transformers, peft, accelerate or trl,
    nor in fxrl itself, wherever that is. Only fxrl's losses and RL code count as the user's, even
    installed: they are plain PyTorch of the kind that users write.
    Where every frame is a library's, the innermost one is named. Paths inside the working
    directory are relative to it.
    """
    return source_of_trace(node.meta.get("stack_trace") or "")


def source_of_trace(stack_trace: str) -> str:
    """The same for the text of a stack trace (innermost frame last, as Python prints it)."""
    frames = list(_frames(stack_trace))
    if not frames:
        return ""
    users = [frame for frame in frames if not is_library(frame[0])]
    file, line = (users or frames)[-1]
    return f"{_shorten(file)}:{line}"


def _frames(stack_trace: str) -> Iterator[tuple[str, str]]:
    for match in _FRAME.finditer(stack_trace):
        if not match["file"].startswith("<"):  # "<string>", "<eval_with_key>.3": generated code
            yield match["file"], match["line"]


def is_library(file: str) -> bool:
    """Whether a file is not the user's, by the rule of ``user_source``."""
    if file.startswith(_OURS):
        return not file.startswith(_USER_LIKE)
    if f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}dist-packages{os.sep}" in file:
        return True
    if any(file.startswith(root + os.sep) for root in _library_roots()):
        return True
    # An editable checkout, such as ~/src/transformers/src/transformers/models/qwen3/modeling.py.
    return any(f"{os.sep}src{os.sep}{name}{os.sep}" in file for name in _LIBRARIES)


@cache
def _library_roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    torch_root = os.path.dirname(os.path.dirname(os.path.abspath(fx.__file__)))
    return (paths["stdlib"], paths["platstdlib"], torch_root)


def _shorten(file: str) -> str:
    here = os.getcwd()
    inside = os.path.isabs(file) and file.startswith(here.rstrip(os.sep) + os.sep)
    return os.path.relpath(file, here) if inside else file
