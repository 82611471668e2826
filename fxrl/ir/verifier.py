"""Checks that a graph is sound between passes: well formed, and its fake values what its ops give.

Every pass relies on ``meta["val"]`` of every other one; a value set by hand and wrong shows up
here, under the name of the pass that set it, and not three passes later.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true

from fxrl.ir.bodies import graphs_of
from fxrl.ir.graph import HigherOrderOperator, fake_mode_of, held, hint, inputs_of, memory_like
from fxrl.ir.region import region_at


class GraphError(AssertionError):
    """A pass left a graph that is not sound: a defect of the pass, never of the user's code."""


class GraphCheck:
    """Checks a graph and the bodies of its calls after each pass that changed it. With ``values``,
    fake values that a pass changed are also recomputed and compared."""

    def __init__(self, gm: fx.GraphModule, *, values: bool) -> None:
        self.values = values
        self._alive: list[Any] = []  # what the keys name, which nothing else may take the place of
        self._sound = {self._key(n) for graph in graphs_of(gm) for n in graph.nodes if values}

    def after(self, name: str, gm: fx.GraphModule) -> None:
        """Check what the pass ``name`` made of the graph."""
        run = _Runner()
        for graph in graphs_of(gm):
            try:
                graph.lint()
            except RuntimeError as error:
                raise GraphError(f"after {name}: {error}") from error
            if self.values:
                self._check_values(graph, name, run)

    def _check_values(self, graph: fx.Graph, name: str, run: _Runner) -> None:
        mode = fake_mode_of(graph)
        if mode is None or mode.shape_env is None:
            return
        env = mode.shape_env
        with mode, torch.no_grad(), env.suppress_guards(), env.ignore_fresh_unbacked_symbols():
            for node in graph.nodes:
                if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
                    continue
                if (key := self._key(node)) not in self._sound:
                    _check(node, name, run)
                    self._sound.add(key)

    def _key(self, node: fx.Node) -> tuple[Any, ...]:
        """What the check of a node depends on: its target, its operands' values and its own. Copies
        of a node, as inlining makes them, have the same key."""
        own, region = node.meta.get("val"), node.meta.get("region")
        known = {arg: _value(arg) for arg in node.all_input_nodes}
        self._alive += [own, region, *known.values()]
        call = fx.map_arg((node.args, node.kwargs), lambda arg: id(known[arg]))
        return node.target, str(call), id(region), id(own)


class _Runner:
    """Runs what nodes call: a body, whose own nodes are checked too, once for equal inputs."""

    def __init__(self) -> None:
        self._made: dict[tuple[fx.GraphModule, str], Any] = {}

    def __call__(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        if (region := region_at(node)) is None:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        body, inputs = region.forward, args[0]
        key = body, _layouts(inputs)
        if key not in self._made:
            taken: list[Any] = [n.meta.get("val") for n in inputs_of(body.graph)]
            same = all(isinstance(x, Tensor) for x in taken) and _layouts(taken) == key[1]
            if same:
                result = body.graph.output_node().args[0]
                self._made[key] = fx.map_arg(result, lambda node: node.meta.get("val"))
            else:
                self._made[key] = _Inside(body).run(*inputs)
        return self._made[key]


def _layouts(values: list[Tensor]) -> str:
    return str([(_show(value), value.stride()) for value in values])


def _check(node: fx.Node, after: str, run: _Runner) -> None:
    vals = {arg: _operand(arg) for arg in node.all_input_nodes}
    if any(val is None for val in vals.values()):
        return
    args: Any = fx.map_arg(node.args, vals.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, vals.__getitem__)
    told, made = _flat(node.meta.get("val")), _flat(run(node, args, kwargs))
    for one, other in itertools.zip_longest(told, made):
        if not _same(one, other):
            raise GraphError(
                f"after {after}: %{node} is said to hold {_show(one)}, and {node.target} gives "
                f"{_show(other)}"
            )


class _Inside(fx.Interpreter):
    """Runs a region's graph, and those of the regions in it, which nobody has built yet."""

    def run_node(self, n: fx.Node) -> Any:
        if (region := region_at(n)) is None:
            return super().run_node(n)
        inputs: Any = self.fetch_args_kwargs_from_env(n)[0][0]
        return _Inside(region.forward).run(*inputs)


def _value(node: fx.Node) -> Any:
    """The value of a node, or the constant that it reads."""
    return held(node) if node.op == "get_attr" else node.meta.get("val")


def _operand(node: fx.Node) -> Any:
    value = _value(node)
    if node.op != "get_attr":
        return value
    return memory_like(value) if isinstance(value, Tensor) else None


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        kind = (one.dtype, one.device) == (other.dtype, other.device)
        return kind and one.dim() == other.dim() and all(map(_equal, one.shape, other.shape))
    if isinstance(one, (int, torch.SymInt)) and isinstance(other, (int, torch.SymInt)):
        return _equal(one, other)
    if torch.SymBool in (type(one), type(other)):  # a comparison that a fact may have decided since
        return isinstance(one, (bool, torch.SymBool)) and isinstance(other, (bool, torch.SymBool))
    return type(one) is type(other)


def _equal(one: Any, other: Any) -> bool:
    """Equal for all sizes, or for those that the tracing run saw: a pass may rely on its guards."""
    if any(isinstance(v, torch.SymInt) and free_unbacked_symbols(v) for v in (one, other)):
        return True
    return bool(statically_known_true(one == other)) or hint(one) == hint(other)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} on {value.device}"
    return str(value)
