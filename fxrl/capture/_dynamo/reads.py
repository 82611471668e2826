"""What a function reads besides its arguments: whether that is what it was."""

# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from fxrl.capture.held_models import names_in
from fxrl.ir.source import is_library

LITERALS = int, float, bool, str, bytes, type(None), torch.dtype, torch.device
_CODE = FunctionType, BuiltinFunctionType, ModuleType, type
_DEEP = 4  # objects within objects


class Read:
    """What a function, with those that it calls, reads besides the numbers that it is given.

    Attributes:
        told: equal while all of that is the same: numbers and their like by value, tensors by
            identity and version, other objects by the attributes that the code names.
        tensors: whether tensors are among it.
    """

    def __init__(self, function: Any, given: Iterable[Any]) -> None:
        self._names, self._owners, self.tensors = set[str](), list[Any](), False
        functions, seen, found = [function], set[CodeType](), list[Any]()
        for one in functions:  # which grows
            code = getattr(one, "__code__", None)
            if code is None or code in seen or is_library(code.co_filename):
                continue
            seen.add(code)
            self._names |= (names := names_in(code))
            self._owners += (cells := one.__closure__ or ())
            values = [cell.cell_contents for cell in cells]
            values += [one.__self__] if hasattr(one, "__self__") else []
            values += [one.__globals__[name] for name in sorted(names & one.__globals__.keys())]
            functions += values
            found += [value for value in values if not isinstance(value, _CODE)]
        self.told = [self._tell(value, 0) for value in (*found, *given)]

    def is_written(self, tx: Any) -> bool:
        """Whether the trace at hand has written into some of it, by code behind the graph."""
        effects = tx.output.side_effects
        known = (effects.id_to_variable.get(id(owner)) for owner in self._owners)
        globals_stored = tx.output.root_tx.symbolic_globals.keys()
        return not self._names.isdisjoint(globals_stored) or any(
            one is not None and one.mutation_type is not None and effects.is_modified(one)
            for one in known
        )

    def _tell(self, value: Any, depth: int) -> Any:
        if isinstance(value, LITERALS):
            return repr(value)
        if depth == _DEEP:
            return id(value)
        self._owners.append(value)
        if isinstance(value, torch.Tensor):
            self.tensors = True
            return id(value), value._version
        if isinstance(value, dict):
            return [(self._tell(key, _DEEP), self._tell(value[key], depth + 1)) for key in value]
        if isinstance(value, (list, tuple)):
            return [self._tell(one, depth + 1) for one in value]
        return id(value), [
            (name, self._tell(held, depth + 1)) for name, held in self._attributes(value)
        ]

    def _attributes(self, value: Any) -> Iterator[tuple[str, Any]]:
        own = getattr(value, "__dict__", {})
        module = isinstance(value, torch.nn.Module)
        homes = (own, own["_buffers"], own["_parameters"], own["_modules"]) if module else (own,)
        for home in homes:
            yield from ((name, home[name]) for name in sorted(self._names & home.keys()))
