"""How Dynamo traces the Python that models, losses and libraries write, while fxrl captures.

A second door to private names of torch: here Dynamo is taught, for the time of a capture, what it
would end the graph at.

``data``     what Python decides by data          ``effects``  what does something besides
``objects``  imports, classes, instances, layers  ``ends``     where a graph may end
``caches``   what Python computes once            ``counters`` what it counts
``kept``     lists that grow, and what is stored  ``later``    what is made behind a graph
``hooks``    those that it registers              ``loops``    what is left of them at an end

Each has ``REPLACED``, methods of Dynamo, and maybe ``HANDLERS``, instructions of Python that are
traced otherwise; all are put back behind each capture. Beside them ``behind`` runs as written what
fails behind an end.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch

from fxrl.capture import quick_fakes
from fxrl.capture._dynamo import caches, counters, data, effects, ends, kept, later, loops, objects
from fxrl.capture._torch import dynamo_settings, sizes_from_data
from fxrl.capture.branches import Branches

_tracer: Any = torch._dynamo.symbolic_convert
_TRANSLATORS: tuple[Any, ...] = (
    _tracer.InstructionTranslator,
    _tracer.InliningInstructionTranslator,
    _tracer.InliningGeneratorInstructionTranslator,
)
_HANDLERS = objects.HANDLERS | data.HANDLERS | kept.HANDLERS | later.HANDLERS
_REPLACED = [
    *objects.REPLACED,
    *data.REPLACED,
    *effects.REPLACED,
    *kept.REPLACED,
    *later.REPLACED,
    *ends.REPLACED,
    *loops.REPLACED,
    *caches.REPLACED,
    *counters.REPLACED,
    *quick_fakes.REPLACED,
]


@contextmanager
def plain_python_is_traced(root: CodeType, branches: Branches) -> Iterator[None]:
    """What libraries write, and Dynamo ends the graph at, is traced as Python runs it: branches are
    followed in the first graph of ``root``."""
    tables = [one.dispatch_table for one in _TRANSLATORS]
    before = [list(table) for table in tables]
    for table in tables:
        for opcode, handler in _HANDLERS.items():
            table[opcode] = handler
    data.followed.append((root, branches))
    with (
        ExitStack() as replaced,
        sizes_from_data(),
        ends.loops_left_out(branches),
        dynamo_settings({"reorderable_logging_functions": {print, warnings.warn}}),
    ):
        for owner, name, own in _REPLACED:
            replaced.callback(_put_back, owner, name, vars(owner).get(name))
            setattr(owner, name, own)
        try:
            yield
        finally:
            data.followed.pop()
            for table, own in zip(tables, before, strict=True):
                table[:] = own


def _put_back(owner: Any, name: str, had: Any) -> None:
    if had is None:
        delattr(owner, name)
    else:
        setattr(owner, name, had)


def is_first_graph() -> bool:
    """Whether what is compiled now begins the call of a step, so that nothing of it has run."""
    root_tx = _tracer.InstructionTranslator.current_tx().output.root_tx
    return bool(data.followed) and root_tx.f_code is data.followed[-1][0]


def owner_of_graph() -> Any:
    """What the method is of whose code the graph that is compiled now begins in; None for a
    function's."""
    return _tracer.InstructionTranslator.current_tx().output.root_tx.f_locals.get("self")
