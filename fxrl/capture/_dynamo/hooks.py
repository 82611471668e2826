"""Hooks that traced code registers on modules and removes again.

    with module.register_forward_pre_hook(hook):    a loss's, or a model's own around its forward
        logits = model(ids)

Dynamo makes no handle, which holds tables of hooks weakly, and takes a module's tables for what
they were before the trace. Here a module that traced code registers hooks on has tables of the
trace's own, which its calls read. No module has what they hold: where a graph ends and a hook is
left, the trace begins anew, and ends its graph where the hook is registered.
"""

# mypy: disable-error-code="attr-defined, no-untyped-call"
from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.source import AttrSource
from torch._dynamo.variables import ConstantVariable, ConstDictVariable, UserDefinedClassVariable
from torch._dynamo.variables.base import ValueMutationNew

from fxrl.capture._dynamo.frames import end_graph
from fxrl.capture._torch import RestartAnalysis, TableOfHooks, hooks_of_trace

_Module = torch.nn.Module
_REGISTER = {_Module.register_forward_hook.__code__, _Module.register_forward_pre_hook.__code__}
_KINDS = ("_forward_hooks", "_forward_pre_hooks")
_TABLES = frozenset(name for name in vars(_Module()) if name.startswith(_KINDS))
_KEYS = itertools.count(-1, -1)  # Python's own are counted upwards from 0
_LEFT = "fxrl_hooks_are_left"


def table_of(module: torch.nn.Module, name: str, tx: Any, read: Callable[[], Any]) -> Any:
    """The trace's own table of this name; None where there is none, since traced code registers
    nothing there. ``read`` gives what the module itself has."""
    if name not in _TABLES:
        return None
    found, place = hooks_of_trace(tx.output), (id(module), name)
    if place not in found and tx.f_code in _REGISTER and _may_register(tx):
        had = read().realize()
        items = dict(getattr(had, "_base_vt", had).items)
        own = ConstDictVariable(items, mutation_type=ValueMutationNew())
        found[place] = TableOfHooks(module, getattr(module, name), own, [*items])
    return found[place].own if place in found else None


def _may_register(tx: Any) -> bool:
    """Not in what is traced as a graph of its own: it may run again, when the hook is gone."""
    left = hasattr(tx.output.root_tx.speculation_log, _LEFT)
    return not left and tx.output.current_tracer.parent is None


def is_hooked(module: torch.nn.Module, tx: Any) -> bool:
    """Whether a module has hooks now that traced code has registered."""
    found = hooks_of_trace(tx.output)
    return any(key == id(module) and table.changed for (key, _), table in found.items())


def make_handle(tx: Any, hooks: Any, extra_dict: Any = None) -> Any:
    """A ``RemovableHandle`` of such tables."""
    extra = () if extra_dict is None else getattr(extra_dict, "items", ())
    tables = [hooks, *(extra if isinstance(extra, list) else (extra_dict,))]
    known = [id(table.own) for table in hooks_of_trace(tx.output).values()]
    if not all(id(table) in known for table in tables):
        why = "a hook is registered as the step runs; register it before, and keep it"
        end_graph("register_hook()", why)
    source = AttrSource(tx.import_source(__name__), _Handle.__name__)
    given = [ConstantVariable.create(next(_KEYS)), *tables]
    return UserDefinedClassVariable(_Handle, source=source).call_function(tx, given, {})


class _Handle:
    """What Dynamo sees for a ``RemovableHandle``."""

    def __init__(self, key: int, *tables: dict[int, Any]) -> None:
        self.id, self.tables = key, tables

    def remove(self) -> None:
        for table in self.tables:
            table.pop(self.id, None)

    def __enter__(self) -> _Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def end_of_graph(output: Any) -> None:
    """Where a graph ends, each hook that it registers has been removed; else it is traced anew."""
    if any(table.changed for table in hooks_of_trace(output).values()):
        setattr(output.root_tx.speculation_log, _LEFT, True)
        raise RestartAnalysis(restart_reason="hooks are left that traced code has registered")
