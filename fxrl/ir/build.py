"""Build values of a graph: each call carries the fake value that its op gives.

A pass that writes ``meta["val"]`` by hand says what it believes a shape, a stride or a dtype is;
here the op itself says it, on the operands' fake tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import fx

from fxrl.ir.graph import fake_mode_of, needs_grad

#: What a new call tells of the user's code: that of the call it was made for.
_SOURCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node")


class Builder:
    """Makes calls at the graph's insertion point (fx's own ``inserting_before`` moves it)."""

    def __init__(self, graph: fx.Graph, source: fx.Node | None = None) -> None:
        self.graph = graph
        self.source = source  # the node whose place in the user's code new calls carry
        self._mode: Any = None

    def call(self, target: Any, /, *args: Any, **kwargs: Any) -> fx.Node:
        """``target(*args, **kwargs)`` as a value of the graph."""
        node = self.graph.call_function(target, args, kwargs)
        self.update(node)
        node.meta["requires_grad"] = any(map(needs_grad, node.all_input_nodes))
        if self.source is not None:
            node.meta |= {k: v for k, v in self.source.meta.items() if k in _SOURCE}
        return node

    def update(self, node: fx.Node) -> None:
        """Recompute the fake value of a call whose arguments were changed."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
        target: Any = node.target
        if self._mode is None:  # ops without a tensor give fakes, too
            self._mode = fake_mode_of(self.graph) or nullcontext()
        with self._mode:
            node.meta["val"] = target(*args, **kwargs)

    @contextmanager
    def before(self, node: fx.Node) -> Iterator[Builder]:
        """Make calls in front of ``node`` and in its name."""
        with self._at(self.graph.inserting_before(node), node):
            yield self

    @contextmanager
    def after(self, node: fx.Node) -> Iterator[Builder]:
        """Make calls right behind ``node`` and in its name."""
        with self._at(self.graph.inserting_after(node), node):
            yield self

    @contextmanager
    def _at(self, place: Any, node: fx.Node) -> Iterator[None]:
        source, self.source = self.source, node
        try:
            with place:
                yield
        finally:
            self.source = source
