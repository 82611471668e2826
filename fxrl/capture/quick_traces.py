"""Traces of ops that leave ``nn.Module`` as it is.

NOTE [Why]: for each trace torch.fx puts its own ``__call__`` and ``__getattr__`` into ``nn.Module``
and takes them out again. Python then goes through every subclass there is, and forgets what it
knows of their attributes: 1.2 ms for 600 subclasses, for each body of a step and each joint graph.
A tracer of ops has those two do what they do anyway; those that have them do more (export's is one)
trace as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from fxrl.capture._torch import PythonKeyTracer, fx_tracer, swapped

_new_patcher = fx_tracer._new_patcher


def _trace(self: Any, *args: Any, **kwargs: Any) -> fx.Graph:
    if type(self) is not PythonKeyTracer:
        return fx.Tracer.trace(self, *args, **kwargs)
    with swapped(fx_tracer, _new_patcher=_of_all_but_modules):
        return fx.Tracer.trace(self, *args, **kwargs)


@contextmanager
def _of_all_but_modules() -> Iterator[Any]:
    fx_tracer._new_patcher = _new_patcher  # another tracer may run inside
    with _new_patcher() as patcher:
        method = patcher.patch_method

        def patch_method(owner: type, *args: Any, **kwargs: Any) -> None:
            if owner is not nn.Module:
                method(owner, *args, **kwargs)

        patcher.patch_method = patch_method
        yield patcher


#: While a step is captured all traces are made so.
REPLACED: list[tuple[Any, str, Any]] = [(PythonKeyTracer, "trace", _trace)]
