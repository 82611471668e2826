"""Models that a loss reads besides the one it is given: a frozen reference, a teacher, an average.

    def loss_fn(model, batch):
        before = logps(reference, batch)        # in its closure, or a global

    optimize(model, self.loss)                  # self.reference, or self.teachers[0]

They are looked for under the names in the loss's code, and in that of the functions which it names
and which stand in the same file. That is asked at every call of a step, so nothing else is
followed; the layers of a model that is not found are captured one by one.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from typing import Any

from torch import nn

_Names = frozenset[str]
_MANY = 64  # entries of a container that are looked at


def models_held(loss_fn: Callable[..., Any]) -> dict[str, nn.Module]:
    """Each such model by what the code calls it: ``reference``, ``self.teachers``.

    The order is the same in every process: ranks name their graphs' inputs by it.
    """
    found: dict[str, nn.Module] = {}
    seen: set[tuple[int, _Names]] = set()
    waiting: list[tuple[str, Any, _Names]] = [("loss_fn", loss_fn, frozenset(("__call__",)))]
    for name, value, names in waiting:  # which grows meanwhile
        if (id(value), names) in seen:
            continue
        seen.add((id(value), names))
        if isinstance(value, nn.Module):
            if all(value is not other for other in found.values()):
                found[name if name not in found else f"{name}.{len(found)}"] = value
        else:
            waiting += _parts(name, value, names)
    return found


def _parts(name: str, value: Any, names: _Names) -> Iterator[tuple[str, Any, _Names]]:
    """What is read of a value by code with these names; each part with those that read it."""
    if isinstance(value, partial):
        yield from ((name, part, names) for part in (value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from _of_method(value.__func__, "self", value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
        if (written := inspect.unwrap(value)) is not value:
            yield name, written, names
    elif isinstance(value, (dict, list, tuple)):
        items = value.values() if isinstance(value, dict) else value
        yield from ((name, item, names) for item in islice(items, _MANY))
    elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
        held = vars(value)
        yield from ((f"{name}.{one}", held[one], names) for one in sorted(names & held.keys()))
        for one in sorted(names):
            method = getattr(type(value), one, None)
            method = method.fget if isinstance(method, property) else method
            if isinstance(method, types.FunctionType) and _is_near(method, type(value)):
                yield from _of_method(method, name, value)


def names_held(loss_fn: Callable[..., Any]) -> dict[str, str]:
    """What a loss function holds, itself or by functions that it wraps: by the way to it as Dynamo
    writes it, the name that the user gave it."""
    found: dict[str, str] = {}
    waiting: list[tuple[str, Any]] = [("L['loss_fn']", loss_fn)]
    for way, value in islice(waiting, _MANY):  # grows; functions may hold themselves
        if isinstance(value, partial):
            waiting.append((f"{way}.func", value.func))
            found |= {f"{way}.keywords['{name}']": name for name in value.keywords}
        elif isinstance(value, types.FunctionType):
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            for place, (name, cell) in enumerate(cells):
                inner = f"{way}.__closure__[{place}].cell_contents"
                found[inner] = name
                with suppress(ValueError):  # not yet filled
                    waiting.append((inner, cell.cell_contents))
    return found


def _of_method(method: Any, name: str, owner: Any) -> Iterator[tuple[str, Any, _Names]]:
    method = inspect.unwrap(method)
    yield name, method, frozenset()
    if isinstance(method, types.FunctionType):
        yield name, owner, names_in(method.__code__)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any, _Names]]:
    names = names_in(function.__code__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not yet filled
            yield name, cell.cell_contents, names
    for value in (function.__defaults__, function.__kwdefaults__):
        yield "default", value, names
    known = function.__globals__
    for name in sorted(names & known.keys()):
        value = known[name]
        if not isinstance(value, types.FunctionType) or _is_near(value, function):
            yield name, value, names


def _is_near(function: Any, other: Any) -> bool:
    """Whether both stand in one file: what libraries hold is theirs."""
    return bool(function.__module__ == other.__module__)


@cache
def names_in(code: types.CodeType) -> _Names:
    """All names in a function's code, and in that of the functions inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inner))
