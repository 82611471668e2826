"""What a layer is made of: which layers are equal, and whether one is still what it was.

Equal layers differ in nothing but the values of their tensors, and numbers that count them. What is
compared is all that their modules hold; a step asks of each layer at every call whether it still
holds that.
"""

from __future__ import annotations

import itertools
import operator
import re
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.capture._torch import as_written

_PLAIN = (bool, float, complex, bytes, type(None), type, torch.dtype, torch.device)
_DIGITS = re.compile(r"\d+")
_CONTAINERS = (dict, list, tuple, set, frozenset)
_PLAIN_TENSORS = (Tensor, nn.Parameter)  # other classes compute with what attributes say
_TABLES = [name for name in vars(nn.Module()) if name.endswith("_hooks") or "_hooks_" in name]
_HOOKS = [name for name in _TABLES if "state_dict" not in name]  # which no forward calls


class LayerContents:
    """All that the forward of a layer can read of its modules.

    Attributes:
        facts: types, names, flags, and what tensors look like; equal for equal layers.
        objects: what else is met, such as hooks and settings; the same ones in equal layers.
        numbers: attribute and value of each number in an integer or a text, which may count layers.
        tensors: parameters, buffers and other tensors, each once.
        held: all modules, containers, objects with tensors or with nothing, functions that other
            functions made, and classes made for one module, by their ids; equal parts of equal
            layers have one place.
        hooks: those of the layer itself. They run around its forward, so that each layer may have
            its own.
        hooked: whether a part of it has hooks.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.numbers: list[tuple[str, int]] = []
        self.objects: list[Any] = []
        self.tensors: list[Tensor] = []
        self.held: dict[int, int] = {}
        self.hooks = [hook for name in _HOOKS for hook in vars(layer)[name].values()]
        self.hooked = False
        self._watched: list[Any] = []  # containers, of dicts their values, of functions theirs
        self._empty: list[Any] = []
        self._owners: list[Any] = []  # of attributes, whose class may become another
        self._kind = type(layer)
        self._forward: Any = self._kind.forward  # a library may put another in its place
        self.facts = self._forward, self._fact("", layer)
        self._sizes = [*map(len, self._watched)]
        self._values = [*itertools.chain.from_iterable(self._watched)]
        self._looks = [*map(_look, self.tensors)]
        self._kinds = [*map(type, self._owners)]

    def holds(self) -> bool:
        """Whether the layer's modules still hold what they held, and the tensors look the same.

        Asked at every call of the step of some two thousand values a layer, so without Python code
        for each.
        """
        now = itertools.chain.from_iterable(self._watched)
        return (
            self._kind.forward is self._forward
            and not any(self._empty)
            and [*map(len, self._watched)] == self._sizes
            and all(map(operator.is_, now, self._values))
            and [*map(_look, self.tensors)] == self._looks
            and [*map(type, self._owners)] == self._kinds
        )

    def equals(self, other: LayerContents, steps: int) -> bool:
        """Whether a layer ``steps`` further on computes the same, but for what numbers do."""
        return self.is_like(other) and all(
            name == its_name and its - mine in (0, steps)
            for (name, mine), (its_name, its) in zip(self.numbers, other.numbers, strict=True)
        )

    def forget(self) -> None:
        """Hold nothing any more, but know what there was."""
        kept = (self.tensors, self.objects, self._watched, self._values, self._empty, self._owners)
        for held in kept:
            held.clear()
        self.held.clear()
        self.hooks = [object() for _ in self.hooks]  # which no other layer has

    def is_like(self, other: LayerContents) -> bool:
        """Whether the facts are equal, and the objects the same."""
        same = [*map(id, self.objects)] == [*map(id, other.objects)]
        return same and self.facts == other.facts

    def places(self, found: dict[int, Any]) -> dict[int, Any]:
        """What was found of the layer's modules and containers, by place."""
        return {self.held[key]: what for key, what in found.items() if key in self.held}

    def counters(self, other: LayerContents) -> set[str]:
        """Names of the numbers that differ."""
        pairs = zip(self.numbers, other.numbers, strict=True)
        return {mine[0] for mine, its in pairs if mine != its}

    def difference(self, other: LayerContents) -> str:
        """Where the facts of an unequal layer differ first, as names tell; else what does."""
        if self.facts != other.facts:
            return _difference(self.facts, other.facts)
        mine, its = [*map(id, self.objects)], [*map(id, other.objects)]
        apart = (one for one, a, b in zip(self.objects, mine, its, strict=True) if a != b)
        if (one := next(apart, None)) is not None:
            return f"a {type(one).__name__} of its own"
        return ", ".join(sorted(self.counters(other)))

    def _fact(self, name: str, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return repr(value)
        if type(value) in (int, str):  # 3, or "model.layers.3"
            self.numbers += [(name, int(digits)) for digits in _DIGITS.findall(str(value))]
            return type(value), _DIGITS.sub("#", str(value))
        if isinstance(value, types.FunctionType) and (inner := as_written(value)) is not value:
            return "compiled", value.__code__, self._fact(name, inner)  # each layer by itself
        part = isinstance(value, (Tensor, nn.Module, *_CONTAINERS)) or _is_made(value)
        if part or _is_own(value):
            return self._part(name, value)
        if isinstance(value, types.MethodType):
            return "method", value.__func__, self._fact(name, value.__self__)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            return "partial", *(self._fact(name, part) for part in parts)
        self.objects.append(value)
        return "object", type(value)

    def _part(self, name: str, value: Any) -> Any:
        """A part that may be met again, which says its place."""
        place = len(self.held)
        if id(value) in self.held:
            return "again", self.held[id(value)]
        self.held[id(value)] = place
        if isinstance(value, Tensor):
            self.tensors.append(value)
            own = () if type(value) in _PLAIN_TENSORS else self._attributes(value)
            return type(value), *_look(value), value.stride(), *own
        if isinstance(value, type):
            self._watched.append(vars(value).values())
            return value.__name__, value.__bases__, *map(self._of_class, vars(value).items())
        if isinstance(value, types.FunctionType):
            inside = _Own(value)
            self._watched.append(inside)
            self.objects.append(value.__globals__)
            return value.__code__, *map(self._told, inside)
        if not isinstance(value, _CONTAINERS):
            kind: Any = type(value)
            if _is_made_at_run_time(kind):  # for it alone, as ``parametrize`` makes one: a part
                kind = self._part("", kind)
            return kind, *self._attributes(value)
        if not value:
            self._empty.append(value)
            return type(value), place
        if isinstance(value, dict):
            self._watched.append(value.values())
            pairs = ((self._fact(name, k), self._fact(str(k), v)) for k, v in value.items())
            return type(value), *pairs
        if not isinstance(value, (tuple, frozenset)):
            self._watched.append(value)
        return type(value), *(self._fact(name, item) for item in value)

    def _of_class(self, item: tuple[str, Any]) -> Any:
        name, value = item
        if isinstance(value, property):
            return name, *map(self._told, (value.fget, value.fset, value.fdel))
        return name, self._told(value)

    def _attributes(self, value: Any) -> Iterator[Any]:
        own = value.__dict__
        self.held[id(own)] = len(self.held)
        if isinstance(value, nn.Module):
            yield from self._hooks_of(value, around=not self._owners)
            own = {name: held for name, held in own.items() if name not in _TABLES}
        self._watched.append(value.__dict__.values())
        self._owners.append(value)
        yield from ((name, self._fact(name, held)) for name, held in own.items())

    def _hooks_of(self, module: nn.Module, around: bool) -> Iterator[Any]:
        """Hooks are kept by numbers that go on counting: what may be equal is their order."""
        tables = [vars(module)[name] for name in _HOOKS]
        order = {key: place for place, key in enumerate(dict.fromkeys(itertools.chain(*tables)))}
        for name, table in zip(_HOOKS, tables, strict=True):
            if table:
                self._watched.append(table.values())
            else:
                self._empty.append(table)
            if not around:
                self.held[id(table)] = len(self.held)  # the trace may register some there
                yield from ((name, order[key], self._hook(name, v)) for key, v in table.items())
        self.hooked |= bool(order) and not around

    def _hook(self, name: str, hook: Any) -> Any:
        """An object that is called as a hook may be each layer's own, as ``weight_norm``'s is."""
        return (self._part if _is_attributes(hook) else self._fact)(name, hook)

    def _told(self, value: Any) -> Any:
        """What a part that is a function holds. No number of it counts layers: it has no name."""
        if isinstance(value, (int, str, *_PLAIN)):
            return type(value), repr(value)
        if isinstance(value, tuple):
            return tuple(map(self._told, value))
        if _is_made(value) or (isinstance(value, nn.Module) and id(value) in self.held):
            return self._part("", value)
        self.objects.append(value)
        return "object", type(value)


def _difference(mine: Any, its: Any) -> str:
    if not isinstance(mine, tuple) or not isinstance(its, tuple):
        return ""
    for place, (one, other) in enumerate(zip(mine, its, strict=False)):
        if one != other:
            name = _name(other, place - 1)
            inside = _difference(one, other) if _name(one, place - 1) == name else ""
            return ".".join(filter(None, (name, inside)))
    return ""


def _name(fact: Any, place: int) -> str:
    """Of an attribute or an item of a dict, of which ``nn.Module`` keeps most of its own in some;
    what is counted has no number in the facts, but a place."""
    if not isinstance(fact, tuple) or len(fact) != 2:
        return ""
    key = fact[0][1] if isinstance(fact[0], tuple) and len(fact[0]) == 2 else fact[0]
    if not isinstance(key, str) or key in ("_modules", "_parameters", "_buffers"):
        return ""
    return str(place) if key == "#" else key


class _Own:
    """What a function holds besides its code, as a container."""

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Any]:
        function = self._function
        yield from function.__defaults__ or ()
        yield from (function.__kwdefaults__ or {}).values()
        yield from map(_content, function.__closure__ or ())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return cell


def _is_made(value: Any) -> bool:
    """Whether it is a function that was made as another ran, such as a hook: each layer may have
    one of its own, of one code."""
    return isinstance(value, types.FunctionType) and "<locals>" in value.__qualname__


def _is_made_at_run_time(kind: type) -> bool:
    """Whether no module has the class by its name."""
    name = kind.__qualname__
    return "." not in name and name not in vars(sys.modules.get(kind.__module__, kind))


def _is_own(value: Any) -> bool:
    """Whether it is attributes and nothing else, with tensors among them, as what bitsandbytes
    keeps of a weight's scales is, or none at all, as what PEFT keeps of DoRA: a part of a layer, of
    which each has one of its own. What has a lock or a stream among them runs by itself, and its
    attributes change as it does."""
    if not _is_attributes(value):
        return False
    held = value.__dict__.values()
    return not held or any(isinstance(one, Tensor) for one in held)


def _is_attributes(value: Any) -> bool:
    kind: Any = type(value)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    if kind.__new__ is not object.__new__ or slots or not hasattr(value, "__dict__"):
        return False
    return all(
        isinstance(one, (int, str, *_PLAIN, *_CONTAINERS)) or hasattr(one, "__dict__")
        for one in value.__dict__.values()
    )


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.requires_grad, tensor.dtype, tensor.shape, tensor.device
