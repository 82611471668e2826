"""Numbers that a step counts on: ``self.calls += 1``, ``counts["steps"] += 1``.

Dynamo takes an integer of a module for a constant, and each step would be captured anew. What a
graph has written is a symbol of the next one. A number that is only read, such as the 0 by which an
adapter is off, stays a constant.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch._dynamo.source import AttrSource, DictGetItemSource
from torch._dynamo.variables import (
    ConstantVariable,
    ConstDictVariable,
    LazyVariableTracker,
    SymNodeVariable,
)
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.misc import CellVariable
from torch.fx.experimental.symbolic_shapes import DimDynamic

from fxrl.capture._torch import dynamo_settings, variations

_wrap_float = VariableBuilder.wrap_symfloat


def note_written(effects: Any) -> None:
    """Keep in mind where the trace at hand has written numbers."""
    if variations:
        variations[-1].written.update(_written(effects))


def _written(effects: Any) -> Iterator[tuple[str, Any]]:
    for owner, attributes in effects.store_attr_mutations.items():
        # The cell of a local that a comprehension reads has a source without a name.
        if owner.source is not None and not isinstance(owner, CellVariable):
            for name, value in attributes.items():
                if _is_number(value):
                    yield owner.source.name, name
    for owner in list(effects.id_to_variable.values()):  # asked, some grow
        held = getattr(owner, "_base_vt", owner)  # of a class of the user's, or a defaultdict
        if isinstance(held, ConstDictVariable) and owner.source and effects.is_modified(owner):
            for key, value in held.items.items():
                if key.vt.is_python_constant() and _is_number(value):
                    yield owner.source.name, key.vt.as_python_constant()


def _is_number(value: Any) -> bool:
    kinds = int, float
    if isinstance(value, LazyVariableTracker) and not value.is_realized():
        return False  # and is not looked into for that
    if isinstance(value, SymNodeVariable):
        return value.python_type() in kinds
    return isinstance(value, ConstantVariable) and type(value.value) in kinds


def counted(builder: Any, value: Any) -> Any:
    """The symbol for an integer that a graph has written; None for all else."""
    if type(value) is not int or not _is_written(builder.source):
        return None
    return builder.wrap_symint(value, dynamism=DimDynamic.DYNAMIC)


def _float(self: Any, value: float) -> Any:
    dynamic = {"assume_static_by_default": False} if _is_written(self.source) else {}
    with dynamo_settings(dynamic):
        return _wrap_float(self, value)


def _is_written(source: Any) -> bool:
    return bool(variations) and place_of_source(source) in variations[-1].written


def place_of_source(source: Any) -> tuple[str, Any] | None:
    """The source of an object that another source is of, and its name there."""
    if isinstance(source, AttrSource):
        return source.base.name, source.member
    if not isinstance(source, DictGetItemSource):
        return None
    owner = source.base
    attributes = isinstance(owner, AttrSource) and owner.member == "__dict__"
    return (owner.base if attributes else owner).name, source.index


REPLACED: list[tuple[Any, str, Any]] = [
    (VariableBuilder, "wrap_symfloat", _float),
]
