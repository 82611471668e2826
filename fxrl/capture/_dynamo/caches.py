"""What Python computes once and keeps: ``functools.cache``, ``functools.cached_property``.

Dynamo traces the function behind a cache each time that it is called, as if it had none, and ends
the graph at the lock that a cached property takes up to Python 3.11.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.variables import (
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fxrl.capture._dynamo.guarding import NOT_IN, guard_that

_call_wrapped = WrapperUserFunctionVariable.call_function
_UNKNOWN = object()
_LITERALS = int, float, bool, str, bytes, type(None), torch.dtype, torch.device


def _answered(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a cached function says is what its cache has, where it is asked by what is known: it is
    called, as eager would, now and by a guard. Of tensors, and of sizes that vary, it is traced as
    if there were no cache."""
    self = _as_held(self)
    cached = self.wrapper_obj
    known = hasattr(cached, "cache_info") and _is_users(cached)
    known = known and _get_current_dispatch_mode() is None  # a cache is to keep no fake tensor
    positional = [_known(tx, one) for one in (*self.self_args(), *args)]
    named = {name: _known(tx, one) for name, one in kwargs.items()}
    if not known or any(one is _UNKNOWN for one in (*positional, *named.values())):
        return _call_wrapped(self, tx, args, kwargs)
    ask = partial(cached, *positional, **named)
    try:
        answer = ask()
    except Exception:  # which is not kept: it is raised where the function is traced
        return _call_wrapped(self, tx, args, kwargs)
    literal = _is_literal(answer)
    if not literal and (_may_forget(cached) or _has_history(answer)):
        return _call_wrapped(self, tx, args, kwargs)
    said = vars(tx.output).setdefault("_said_by_caches", {})
    key = cached, tuple(map(id, positional)), tuple((n, id(v)) for n, v in named.items())
    if key not in said:
        guard_that(tx, partial(_is_still, ask, answer, literal))
        source = GlobalSource(tx.output.install_global("fxrl_kept", answer))
        said[key] = positional, named, source  # which live on, so that none has another's id
    return VariableTracker.build(tx, answer, *(() if literal else said[key][2:]))


def computed_once(self: Any, tx: Any, name: str) -> Any:
    """An attribute that a cached property of an object's class computes now, and puts in its place;
    None for all others."""
    kinds, effects = type(self.value).__mro__, tx.output.side_effects
    found = next((vars(kind)[name] for kind in kinds if name in vars(kind)), None)
    if type(found) is not cached_property or name in self.value.__dict__:
        return None
    if effects.has_pending_mutation_of_attr(self, name):
        return None
    source = None
    if self.source:
        install_guard(AttrSource(self.source, "__dict__").make_guard(partial(NOT_IN, key=name)))
        source = AttrSource(AttrSource(AttrSource(self.source, "__class__"), name), "func")
    made = VariableTracker.build(tx, found.func, source).call_function(tx, [self], {})
    effects.store_attr(self, name, made)
    return made


def _as_held(wrapped: Any) -> Any:
    """One that an object holds itself is no method, for which torch 2.11 takes it."""
    held = (getattr(owner.value, "__dict__", {}) for owner in wrapped.self_args())
    if not any(one is wrapped.wrapper_obj for attributes in held for one in attributes.values()):
        return wrapped
    how = wrapped.wrapper_obj, wrapped.attr_to_trace
    return WrapperUserFunctionVariable(*how, source=wrapped.source)


def _is_users(cached: Any) -> bool:
    return not (getattr(cached.__wrapped__, "__module__", None) or "").startswith("torch.")


def _known(tx: Any, given: Any) -> Any:
    """The value of an argument that is the same in each call of the graph; else ``_UNKNOWN``."""
    given = given.realize()
    if given.is_python_constant():
        return given.as_python_constant()
    kinds = UserDefinedObjectVariable, UnspecializedNNModuleVariable
    older = isinstance(given, kinds) and given.source
    written = older and tx.output.side_effects.is_modified(given)
    return given.value if older and not written else _UNKNOWN


def _is_literal(answer: Any) -> bool:
    """Whether one that equals it does as well."""
    return type(answer) in _LITERALS or (type(answer) is tuple and all(map(_is_literal, answer)))


def _may_forget(cached: Any) -> bool:
    """Whether a cache is full, so that what it says may be made anew at each call."""
    info = cached.cache_info()
    return info.maxsize is not None and info.currsize >= info.maxsize


def _has_history(answer: Any) -> bool:
    return isinstance(answer, torch.Tensor) and answer.grad_fn is not None


def _is_still(ask: Callable[[], Any], answer: Any, literal: bool) -> bool:
    found = ask()
    return found is answer or (literal and type(found) is type(answer) and found == answer)


REPLACED: list[tuple[Any, str, Any]] = [
    (WrapperUserFunctionVariable, "call_function", _answered),
]
