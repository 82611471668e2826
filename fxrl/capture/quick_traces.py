"""Traces of ops that leave ``nn.Module`` as it is.

NOTE [Why]: for each trace torch.fx puts its own ``__call__`` and ``__getattr__`` into ``nn.Module``
and takes them out again. Python then goes through every subclass there is, and forgets what it
knows of their attributes: 1.2 ms for 600 subclasses, for each body of a step and each joint graph.
A tracer of ops has those two do what they do anyway; those that have them do more (export's is one)
trace as before.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn
from torch.fx import _symbolic_trace

from fxrl.capture._torch import PythonKeyTracer, swapped


def _trace(self: Any, *args: Any, **kwargs: Any) -> fx.Graph:
    if type(self) is not PythonKeyTracer:
        return fx.Tracer.trace(self, *args, **kwargs)
    patcher = _symbolic_trace._new_patcher

    @contextmanager
    def patching() -> Iterator[Any]:
        _symbolic_trace._new_patcher = patcher  # another tracer may run inside
        with patcher() as made:
            method = made.patch_method

            def patch_method(owner: type, *args: Any, **kwargs: Any) -> None:
                if owner is not nn.Module:
                    method(owner, *args, **kwargs)

            made.patch_method = patch_method  # type: ignore[assignment]
            yield made

    with swapped(_symbolic_trace, _new_patcher=patching):
        return fx.Tracer.trace(self, *args, **kwargs)


#: While a step is captured all traces are made so.
REPLACED: list[tuple[Any, str, Any]] = [(PythonKeyTracer, "trace", _trace)]
