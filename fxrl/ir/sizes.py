"""Symbolic sizes: as values of a graph, and as numbers once a body's inputs are seen.

    known   x : f32[b, s + 1]                 what the dims of some tensors tell
    asked   b * s                             what follows: size(x, 0) * (size(x, 1) - 1)

A batch of ids ``[B, T]`` and masks ``[B, T - 1]`` holds sizes that are no plain symbol, and any of
them may be the only place where a symbol shows. So a size is found in three ways: it is known, it
is made of sizes that are (sums, products, quotients, ...), or a known one is solved for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import sympy  # type: ignore[import-untyped]  # sympy ships no stubs
import torch
from sympy.core.function import Application  # type: ignore[import-untyped]
from torch import Tensor, fx

from fxrl.ir.graph import Size, is_call, shape_of
from fxrl.ir.region import InputSpec
from fxrl.ir.remark import Refusal

V = TypeVar("V")
aten = torch.ops.aten

#: How each kind of sympy expression that PyTorch makes of sizes is computed, by its class's name.
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Pow": operator.pow,
    "PowByNatural": operator.pow,
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    sympy.Eq.__name__: operator.eq,
    sympy.Ne.__name__: operator.ne,
    sympy.Gt.__name__: operator.gt,
    sympy.Ge.__name__: operator.ge,
    sympy.Lt.__name__: operator.lt,
    sympy.Le.__name__: operator.le,
}


@dataclass(frozen=True, slots=True)
class _Apply(Generic[V]):
    """An operator on two formulas; a formula is a number, a known size, or such an application."""

    operator: Callable[[Any, Any], Any]
    left: V | int | _Apply[V]
    right: V | int | _Apply[V]


def _value(formula: Any, apply: Callable[[Any, Any, Any], Any], known: Callable[[Any], Any]) -> Any:
    """Evaluate a formula: ``apply(operator, left, right)`` computes, ``known`` reads a leaf."""
    if isinstance(formula, _Apply):
        left, right = (_value(part, apply, known) for part in (formula.left, formula.right))
        return apply(formula.operator, left, right)
    return formula if isinstance(formula, int) else known(formula)


@dataclass(slots=True)
class _Known(Generic[V]):
    """Known sizes by their expressions, and the formulas of what follows from them."""

    sizes: dict[Any, Any] = field(default_factory=dict)

    def learn(self, size: Size, value: V) -> None:
        """``size`` is ``value``, unless it was learnt before."""
        if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
            self.sizes.setdefault(size.node.expr, value)

    def formula(self, size: Size | torch.SymBool) -> V | int | _Apply[V] | None:
        """A formula of known sizes for ``size``; None if there is none."""
        return size if isinstance(size, int) else self.find(size.node.expr)

    def find(self, expr: Any, solving: frozenset[Any] = frozenset()) -> Any:
        if expr.is_Integer:
            return int(expr)
        if expr in self.sizes:
            return self.sizes[expr]
        found = self._solve(expr, solving) if expr.is_Symbol else self._compose(expr, solving)
        if found is None and isinstance(expr, sympy.Expr):
            found = self._divide(expr) or self._eliminate(expr)
        if found is not None and not solving:
            self.sizes[expr] = found
        return found

    def _compose(self, expr: Any, solving: frozenset[Any]) -> Any:
        up = _is_rounded_up(expr)
        function = operator.floordiv if up else _OPERATORS.get(type(expr).__name__)
        if function is None:
            return None
        parts = [self.find(part, solving) for part in _arguments(expr)]
        total = parts[0]
        for part in parts[1:]:
            if total is None or part is None:
                return None
            total = _Apply(function, total, part)
        return _Apply(operator.mul, -1, total) if up else total

    def _solve(self, symbol: Any, solving: frozenset[Any]) -> Any:
        """``symbol`` from a known ``factor * symbol + rest``: whole, so the division is exact."""
        if symbol in solving:
            return None
        solving |= {symbol}
        for expr, value in list(self.sizes.items()):
            if symbol not in expr.free_symbols or not _is_polynomial(expr):
                continue
            factor = expr.diff(symbol)
            if symbol in factor.free_symbols or factor.is_zero is not False:
                continue
            rest = self.find(expr.subs(symbol, 0), solving)
            divisor = self.find(factor, solving)
            if rest is None or divisor is None:
                continue
            part = value if rest == 0 else _Apply(operator.sub, value, rest)
            return part if divisor == 1 else _Apply(operator.floordiv, part, divisor)
        return None

    def _divide(self, expr: Any) -> Any:
        """``expr`` as a multiple of a known product (``a * b``) of sizes known nowhere."""
        for known, value in list(self.sizes.items()):
            if known.is_Mul and expr.is_Mul and _is_polynomial(expr / known):
                factor = self.find(expr / known)
                if factor is not None:
                    return _Apply(operator.mul, value, factor)
        return None

    def _eliminate(self, expr: Any) -> Any:
        """``expr`` with a known sum (``a + b``) put in for its symbols, which are known nowhere."""
        expr = _polynomial(expr)
        for size, value in self.sizes.items():
            known = _polynomial(size)
            for symbol in (known.free_symbols & expr.free_symbols) - self.sizes.keys():
                if known.diff(symbol) != 1:
                    continue
                whole = sympy.Symbol(f"<{known}>", integer=True)
                rest = expr.subs(symbol, whole - (known - symbol)).expand()
                if rest.free_symbols - self.sizes.keys() == {whole}:
                    return _Known({**self.sizes, whole: value}).find(rest)
        return None


def share_of(tokens: Size, ranks: int) -> Size:
    """How many of a sequence's tokens a rank holds where ``ranks`` share it.

    One token is the constant 1, under a guard: PyTorch specialises dims of size 1, so a symbol that
    may be 1 fits no graph.
    """
    local = (tokens + ranks - 1) // ranks
    return 1 if local == 1 else local


def _is_polynomial(expr: Any) -> bool:
    """Whether a size is made of symbols and numbers by sums and products alone."""
    whole = expr.is_Symbol or expr.is_Integer
    return whole or ((expr.is_Add or expr.is_Mul) and all(map(_is_polynomial, expr.args)))


def _is_rounded_up(expr: Any) -> bool:
    """Whether it is ``math.ceil(a / b)``, as windows are counted: ``-(-a // b)``."""
    kind = type(expr).__name__
    return kind == "CeilToInt" and type(expr.args[0]).__name__ == "IntTrueDiv"


def _arguments(expr: Any) -> tuple[Any, ...]:
    """What an operator is applied to."""
    if not _is_rounded_up(expr):
        return tuple(expr.args)
    whole, part = expr.args[0].args
    return -whole, part


def _polynomial(expr: Any) -> Any:
    """A size with a symbol for each part that is no sum or product, such as ``max(a, b)``."""
    parts = expr.atoms(Application)
    return expr.xreplace({part: sympy.Symbol(f"<{part}>", integer=True) for part in parts})


def _told_by(symbol: Any, exprs: Sequence[Any]) -> Any:
    """The symbol; or, where no dim is just that, the dim that is linear in it with the least
    factor."""
    linear = [
        expr
        for expr in exprs
        if expr.free_symbols == {symbol} and _is_polynomial(expr) and expr.diff(symbol).is_Integer
    ]
    return symbol if symbol in exprs else min(linear, key=lambda e: e.diff(symbol), default=symbol)


def measure_by(values: Mapping[Any, Any]) -> Callable[[Any], int]:
    """A function that evaluates sizes, and expressions of sizes, with these values of symbols.

    A symbol that is not among them (a count that depends on data) counts as 1.
    """
    known: dict[Any, int] = {}

    def measure(size: Any) -> int:
        if isinstance(size, int):
            return size
        expr = size.node.expr if isinstance(size, torch.SymInt) else size
        if expr not in known:
            found = expr.xreplace(values)
            known[expr] = int(found.xreplace(dict.fromkeys(found.free_symbols, sympy.Integer(1))))
        return known[expr]

    return measure


# ---------------------------------------------------------------------------- in a graph
Place = fx.Node | tuple[fx.Node, int]  # a number of the graph, or a dim of a tensor


class SizeTable:
    """Finds or builds the graph value of a symbolic size.

    Passes need sizes such as ``B`` or ``T - 1`` as graph arguments. Dims of inputs, and numbers
    made of these, come first: they hold whatever is rewritten. Where these do not tell (a count
    that depends on data), any other value of the graph does.
    """

    def __init__(self, graph: fx.Graph, nodes: Iterable[fx.Node] | None = None) -> None:
        """Learn from ``nodes``, by default from all of the graph."""
        self._graph = graph
        self._made: dict[Place | _Apply[Place], fx.Node] = {}
        self._inputs: _Known[Place] = _Known()
        self._rest: list[fx.Node] = []
        stable: set[fx.Node] = set()
        for node in graph.nodes if nodes is None else nodes:
            number = isinstance(node.meta.get("val"), torch.SymInt)
            if node.op in ("placeholder", "get_attr") or (
                number and all(arg in stable for arg in node.all_input_nodes)
            ):
                stable.add(node)
                _learn(self._inputs, node)
            else:
                self._rest.append(node)
        self._all: _Known[Place] | None = None

    def arg(self, size: Any, at: fx.Node | None = None) -> int | fx.Node:
        """``find``, for a value that needs the size. Raises ``Refusal`` where it is not told."""
        if (found := self.find(size)) is None:
            raise Refusal(f"the size {size} is told by no input", at=at)
        return found

    def find(self, size: Any) -> int | fx.Node | None:
        """``size``, or how two compare, as an argument of a graph call; None when it cannot be
        expressed.

        New nodes go to the graph's current insertion point; sort the graph afterwards.
        """
        if not isinstance(size, (int, torch.SymInt, torch.SymBool)):
            return None
        found = self.of_inputs(size)
        if found is None:
            if self._all is None:
                self._all = _Known(dict(self._inputs.sizes))
                for node in self._rest:
                    _learn(self._all, node)
            found = self._made_of(self._all.formula(size))
        return found

    def of_inputs(self, size: Size | torch.SymBool) -> int | fx.Node | None:
        """``size`` as ``find`` gives it where the graph's inputs tell it; else None."""
        return self._made_of(self._inputs.formula(size))

    def _made_of(self, formula: Any) -> int | fx.Node | None:
        return None if formula is None else _value(formula, self._call, self._read)

    def _read(self, place: Place) -> fx.Node:
        if isinstance(place, fx.Node):
            return place
        if place not in self._made:
            node, dim = place
            size = self._graph.call_function(aten.sym_size.int, (node, dim))
            if "val" in node.meta:
                size.meta["val"] = shape_of(node)[dim]
            self._made[place] = size
        return self._made[place]

    def _call(
        self, function: Callable[[Any, Any], Any], left: fx.Node | int, right: fx.Node | int
    ) -> fx.Node | int:
        if isinstance(left, int) and isinstance(right, int):
            return int(function(left, right))
        key: _Apply[Any] = _Apply(function, left, right)
        if key not in self._made:
            made = self._graph.call_function(function, (left, right))
            vals = [arg if isinstance(arg, int) else arg.meta.get("val") for arg in (left, right)]
            if None not in vals:
                made.meta["val"] = function(*vals)
            self._made[key] = made
        return self._made[key]


def _learn(known: _Known[Place], node: fx.Node) -> None:
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt):
        known.learn(val, node)
    elif isinstance(val, Tensor) and not is_call(node, aten.sym_size.int):
        for dim, size in enumerate(val.shape):
            known.learn(size, (node, dim))


# ---------------------------------------------------------------------------- of a body's inputs
class BoundSizes:
    """The sizes of a body that vary, by name, and how they are read off its inputs.

    Names are the symbols in the inputs' dims; ``rows`` is how many rows a tiled input has. Where a
    symbol cannot be told from the dims (``a + b`` alone), the dim as a whole is a name.
    """

    def __init__(self, specs: Sequence[InputSpec]) -> None:
        known: _Known[tuple[int, int]] = _Known()
        tiled: list[tuple[int, int]] = []
        for index, spec in enumerate(specs):
            for dim, size in enumerate(spec.example.shape):
                if spec.tiled and dim == 0:
                    tiled.append((index, 0))
                else:
                    known.learn(size, (index, dim))
        exprs = list(known.sizes)
        symbols = dict.fromkeys(s for expr in exprs for s in sorted(expr.free_symbols, key=str))
        found = {
            symbol: formula for symbol in symbols if (formula := known.find(symbol)) is not None
        }
        # NOTE [Why the dim is a name]: where only ``s + 1`` or ``2 * s`` is a dim, Inductor cannot
        # tell ``s`` from it ("expected [s] to have been codegen-ed").
        names = {symbol: _told_by(symbol, exprs) for symbol in found}
        self._given: _Known[str] = _Known({name: str(name) for name in names.values()})
        places: dict[str, Any] = {
            str(name): known.sizes.get(name, found[symbol]) for symbol, name in names.items()
        }
        for expr in exprs:
            if self._given.find(expr) is None:
                self._given.sizes[expr] = str(expr)
                places[str(expr)] = known.sizes[expr]
        if tiled:
            places["rows"] = tiled[0]
        self.names = tuple(places)  # in a fixed order
        self._places = tuple(places.values())

    def read(self, inputs: Sequence[Tensor]) -> tuple[Size, ...]:
        """The values of the named sizes in these inputs; they are symbols where the inputs are
        fake."""

        def dim(place: tuple[int, int]) -> Size:
            return inputs[place[0]].shape[place[1]]

        return tuple(_value(place, operator.call, dim) for place in self._places)

    def evaluate(self, size: Size, sizes: Mapping[str, Size]) -> Size | None:
        """A size of the outer graph where the names are ``sizes`` (numbers, or symbols again).

        None where the names do not tell.
        """
        formula = self._given.formula(size)
        return None if formula is None else _value(formula, operator.call, sizes.__getitem__)

    def size(self, size: Size, sizes: Mapping[str, Size]) -> Size:
        """``evaluate`` of a size of an input's dims, which the names always tell."""
        found = self.evaluate(size, sizes)
        assert found is not None, f"no input tells the size {size}"
        return found
