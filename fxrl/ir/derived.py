"""Inputs that a pass adds to a graph: computed from another input, and again when that changes.

    %w = input                    %w       = input
                       becomes    %w_0     = input      quantised values of %w
                                  %w_1     = input      their scales

A value that depends on a weight alone is the same at every step, and not worth computing in each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from fxrl.ir.graph import add_input, inputs_of, val_of

Make = Callable[[Tensor], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Derived:
    """The origin of an added input."""

    place: int  # of the input that it is computed from, among the graph's inputs
    make: Make  # what computes it; equal functions give equal values
    index: int  # which of the results it is


def add_derived(gm: fx.GraphModule, source: fx.Node, make: Make) -> list[fx.Node]:
    """The inputs that hold ``make`` of an input; those that are there already, or new ones."""
    inputs = inputs_of(gm.graph)
    place = inputs.index(source)
    known = {node.meta["derived"]: node for node in inputs if "derived" in node.meta}
    val: Any = val_of(source)
    with val.fake_mode:
        made = make(val)
    found = []
    for index, part in enumerate(made):
        where = Derived(place, make, index)
        if where not in known:
            known[where] = add_input(gm.graph, f"{source.name}_{index}", part)
            known[where].meta["derived"] = where
        found.append(known[where])
    return found


def derived_inputs(gm: fx.GraphModule) -> list[Derived]:
    """The inputs that were added to a graph, in order."""
    inputs = inputs_of(gm.graph)
    return [node.meta["derived"] for node in inputs if "derived" in node.meta]


class DerivedInputs:
    """The values of added inputs, each computed once for as long as its source is what it was.

    NOTE [Why the version]: whoever writes to a tensor raises its version, but for what is written
    through ``.data``, which says that nobody shall notice.
    """

    def __init__(self) -> None:
        self._made: Any = WeakTensorKeyDictionary()

    def of(self, asked: Sequence[Derived], args: Sequence[Any]) -> list[Tensor]:
        """The values of the inputs that were added to a graph, where its own are ``args``."""
        return [self._value(one, args[one.place]) for one in asked]

    def _value(self, one: Derived, source: Tensor) -> Tensor:
        version, made = self._made.get(source, (None, {}))
        if version != source._version:
            made = {}
            self._made[source] = source._version, made
        if one.make not in made:
            made[one.make] = one.make(source.detach())
        value: Tensor = made[one.make][one.index]
        return value
