"""What Python computes once and keeps: ``functools.cache``, ``functools.cached_property``.

Dynamo traces the function behind a cache each time that it is called, as if it had none, and ends
the graph at the lock that a cached property takes up to Python 3.11. Asked by sizes that vary it is
traced, too, and what it reads is kept in mind: a cache has what was so when it was first asked.
"""

# mypy: disable-error-code="attr-defined, method-assign, no-untyped-call"
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource, GlobalSource
from torch._dynamo.variables import (
    TensorVariable,
    UnspecializedNNModuleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import WrapperUserFunctionVariable
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fxrl.capture._dynamo.frames import end_graph, in_body
from fxrl.capture._dynamo.guarding import NOT_IN, guard_by, guard_that
from fxrl.capture._torch import never_captured
from fxrl.capture.held_models import names_in
from fxrl.capture.repeated import has_read
from fxrl.ir.sizes import measure_by
from fxrl.ir.source import is_library

_call_wrapped = WrapperUserFunctionVariable.call_function
_UNKNOWN = object()
_LITERALS = int, float, bool, str, bytes, type(None), torch.dtype, torch.device
_CODE = FunctionType, BuiltinFunctionType, ModuleType, type
_DEEP = 4  # objects within objects
_DRAWS = re.compile(
    r"rand(n|int|perm|om_)?(_like)?|(bernoulli|normal|uniform|exponential)_?|multinomial|\w*dropout_?"
)
#: By cache, and the objects that it is asked of, what its function read when it was first asked by
#: a size that varies.
_FIRST_READ: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _answered(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What a cached function says is what its cache has, where it is asked by what is known: it is
    called, as eager would, now and by a guard. Of tensors that the step makes, and of sizes that
    vary, it is traced as if there were no cache."""
    self = _as_held(self)
    cached = self.wrapper_obj
    known = hasattr(cached, "cache_info") and _is_users(cached)
    known = known and _get_current_dispatch_mode() is None  # a cache is to keep no fake tensor
    positional = [_known(tx, one) for one in (*self.self_args(), *args)]
    named = {name: _known(tx, one) for name, one in kwargs.items()}
    if not known:
        return _call_wrapped(self, tx, args, kwargs)
    held = [one for one in (*positional, *named.values()) if one is not _UNKNOWN]
    for one in held:  # the cache has an answer of its own for that of each layer
        has_read(one, one)
    if any(one is _UNKNOWN for one in (*positional, *named.values())):
        return _traced_through(self, tx, args, kwargs, held)
    _what_is_read(tx, cached, (*positional, *named.values()))
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


def _traced_through(self: Any, tx: Any, args: Any, kwargs: dict[str, Any], held: Any) -> Any:
    """What a cached function makes of sizes that vary: they are asked of its cache, too, behind the
    graph, so that it holds what it would. The graph ends where the function draws random numbers,
    or where what it reads is not what it was: only the cache still knows what it made of that."""
    cached, nodes = self.wrapper_obj, tx.output.graph.nodes
    given = [one.realize() for one in (*self.self_args(), *args, *kwargs.values())]
    read = _what_is_read(tx, cached, held)
    first, objects = _FIRST_READ.setdefault(cached, {}), tuple(map(id, held))
    if cached.cache_info().currsize and first.get(objects, read.told) != read.told:
        _end_graph(cached, "what it reads has changed since its cache was asked")
    before, drawn = len(nodes), len(tx.output.random_calls)
    answer = _call_wrapped(self, tx, args, kwargs)
    added = [getattr(node.target, "__name__", str(node.target)) for node in list(nodes)[before:]]
    if len(tx.output.random_calls) > drawn or any(map(_DRAWS.fullmatch, added)):
        _end_graph(cached, "it draws random numbers once, for sizes that vary")
    if read.told and not any(isinstance(one, TensorVariable) for one in given):
        first[objects] = read.told
        if read.tensors:  # the graph is given whichever there are
            guard_that(tx, lambda: _Read(cached.__wrapped__, held).told == read.told)
        behind = [_Behind(tx, one) for one in given]
        if in_body(tx) and any(one.leaves_body for one in behind):
            _end_graph(cached, "what it is asked of is known only within a layer")
        asked = _Asked(tx, cached, tuple(kwargs), behind)
        tx.output.root_tx.debug_locals.append((asked, asked.given))
    return answer


def _what_is_read(tx: Any, cached: Any, given: Iterable[Any]) -> _Read:
    read = _Read(cached.__wrapped__, given)
    if read.is_written(tx):
        _end_graph(cached, "the step writes into what it reads before it asks the cache")
    return read


def _end_graph(cached: Any, why: str) -> None:
    name = getattr(cached, "__qualname__", "a function")
    end_graph("cached function", f"{name} is cached, and {why}")


class _Behind:
    """What code behind the graph is given for an argument. A size is made of the inputs' sizes
    again: what a layer computes does not leave it.

    Attributes:
        given: values that the code is given.
        leaves_body: whether a number among them is computed by the graph.
    """

    def __init__(self, tx: Any, argument: Any) -> None:
        number = getattr(argument, "sym_num", None)
        self.given, self.leaves_body = [argument], number is not None
        self._size: tuple[Any, list[Any]] | None = None
        if not isinstance(number, torch.SymInt):
            return
        symbols = sorted(number.node.expr.free_symbols, key=str)
        sources = [_source_of(tx, one) for one in symbols]
        if all(sources):
            self.given = [VariableTracker(source=one) for one in sources]
            self._size, self.leaves_body = (number.node.expr, symbols), False

    def argument(self, given: Any) -> Any:
        """The argument, of what the code was given next."""
        if self._size is None:
            return next(given)
        expression, symbols = self._size
        return measure_by({one: sympy.Integer(next(given)) for one in symbols})(expression)


def _source_of(tx: Any, symbol: Any) -> Any:
    """Where code finds a size, or None."""
    sources = tx.output.shape_env.var_to_sources.get(symbol, ())
    return next((one for one in sources if not one.is_ephemeral()), None)


class _Asked(VariableTracker):
    """Behind the graph, code asks a cache: of arguments whose last ones have these names."""

    def __init__(self, tx: Any, cached: Any, names: tuple[str, ...], behind: list[_Behind]) -> None:
        @never_captured("a cache keeps what eager makes")
        def ask(*given: Any) -> None:
            values = iter(given)
            asked = [one.argument(values) for one in behind]
            first = len(asked) - len(names)
            cached(*asked[:first], **dict(zip(names, asked[first:], strict=True)))

        super().__init__(source=GlobalSource(tx.output.install_global("fxrl_ask", ask)))
        self.given = [value for one in behind for value in one.given]


class _Read:
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
        if isinstance(value, _LITERALS):
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
    if isinstance(given, TensorVariable):
        return _older_tensor(tx, given)
    kinds = UserDefinedObjectVariable, UnspecializedNNModuleVariable
    return given.value if isinstance(given, kinds) and given.source else _UNKNOWN


def _older_tensor(tx: Any, given: Any) -> Any:
    """A tensor that is the same in each call, by a guard, such as a weight; not one of a batch."""
    input = given.as_proxy().node.meta.get("grapharg") if given.source else None
    if input is None or given.source.name.startswith("L['batch']"):
        return _UNKNOWN
    if tx.output.side_effects.is_modified(given) or not isinstance(input.example, torch.Tensor):
        return _UNKNOWN
    kept = GlobalSource(tx.output.install_global("fxrl_asked", input.example))
    guard_by(lambda own, kept: f"{own} is {kept}", given.source, kept)
    return input.example


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
