"""Symbolic sizes: what follows from the dims that are seen, as graph values and as numbers."""

import math

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fxrl.ir.region import InputSpec
from fxrl.ir.sizes import BoundSizes, SizeTable


def _cut(prompt, completion):
    """The length of a prompt, less what is too long of it, and a completion."""
    return prompt - torch.sym_max(prompt + completion - 8, 0) + completion


#: name -> (shapes of the inputs, a size that follows from them)
FOLLOWS = {
    "a symbol": (lambda b, s: [(b, s)], lambda b, s: s),
    "a number": (lambda b, s: [(b, s)], lambda b, s: 7),
    "a sum": (lambda b, s: [(b, s)], lambda b, s: s + 1),
    "a difference": (lambda b, s: [(b, s)], lambda b, s: s - 1),
    "known as it is": (lambda b, s: [(b, s + 1)], lambda b, s: s + 1),
    "a symbol from a sum": (lambda b, s: [(b, s + 1)], lambda b, s: s),
    "another sum": (lambda b, s: [(b, s + 1)], lambda b, s: s - 1),
    "a product of sums": (lambda b, s: [(b, s + 1)], lambda b, s: b * s),
    "rows of ids [B, T]": (lambda b, s: [(b, s), (b * (s + 1), 8)], lambda b, s: b * (s + 1)),
    "a symbol from a product": (lambda b, s: [(b, 4), (b * (s + 1), 8)], lambda b, s: s),
    "a symbol from a multiple": (lambda b, s: [(3 * s + 2, b)], lambda b, s: s),
    "a symbol from minus": (lambda b, s: [(b, 100 - s)], lambda b, s: s),
    "two unknowns in turn": (lambda b, s: [(b + 1,), (b + s,)], lambda b, s: s),
    "a half": (lambda b, s: [(b, s + 1)], lambda b, s: s // 2),
    "a remainder": (lambda b, s: [(b, s)], lambda b, s: s % 3),
    "rounded up": (lambda b, s: [(b, s)], lambda b, s: (s + 7) // 8 * 8),
    "whole windows": (lambda b, s: [(b, s + 1)], lambda b, s: math.ceil((s + 1) / b) * b - s),
    "a square": (lambda b, s: [(b, s)], lambda b, s: s * s),
    "the larger": (lambda b, s: [(b, s + 1)], lambda b, s: torch.sym_max(b, s)),
    "the smaller": (lambda b, s: [(b, s + 1)], lambda b, s: torch.sym_min(b, s)),
    "a quotient that is given": (lambda b, s: [(b, s // 2)], lambda b, s: b * (s // 2)),
    "a sum of two that is given": (lambda b, s: [(b + s,)], lambda b, s: b + s),
    "a multiple of that": (lambda b, s: [(b + s,)], lambda b, s: 8 * b + 8 * s),
    "a product with that": (lambda b, s: [(b + s,), (b, 2)], lambda b, s: b * (b + s) + 2 * s),
    "one more than that": (lambda b, s: [(b + s,)], lambda b, s: b + s + 1),
    "a multiple of what is cut": (lambda b, s: [(_cut(b, s),)], lambda b, s: 2 * _cut(b, s) - 1),
    "whether one is more": (lambda b, s: [(b, s + 1)], lambda b, s: s > b),
    "whether both are one": (lambda b, s: [(b, s + 1)], lambda b, s: s == b),
    "a product that is given": (lambda b, s: [(b * s, 8)], lambda b, s: 6 * b * s),
}
UNKNOWN = {
    "one that is cut elsewhere": (lambda b, s: [(_cut(b, s),)], lambda b, s: _cut(b, 2 * s)),
    "another input's": (lambda b, s: [(b, 8)], lambda b, s: s),
    "one of two": (lambda b, s: [(b + s,)], lambda b, s: s),
    "what was rounded": (lambda b, s: [(b, s // 2)], lambda b, s: s),
    "under a factor that may be 0": (lambda b, s: [(b, (b - 3) * s)], lambda b, s: s),
}
BATCHES = [(4, 6), (2, 9), (7, 2)]


class Sizes:
    """Fake tensors over two symbols, and numbers for these."""

    def __init__(self):
        env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=env)
        self.symbols = [self._symbol(env, name, hint) for name, hint in (("b", 4), ("s", 6))]

    @staticmethod
    def _symbol(env, name, hint):
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        return env.create_symintnode(symbol, hint=hint, source=source)

    def tensors(self, shapes):
        with self.mode:
            return [torch.empty(shape) for shape in shapes(*self.symbols)]


@pytest.mark.parametrize("name", FOLLOWS)
def test_a_size_becomes_a_value_of_the_graph(name):
    shapes, size = FOLLOWS[name]
    sizes = Sizes()
    graph = fx.Graph()
    for index, val in enumerate(sizes.tensors(shapes)):
        graph.placeholder(f"x{index}").meta["val"] = val
    asked = size(*sizes.symbols)
    arg = SizeTable(graph).arg(asked)
    if isinstance(arg, fx.Node):
        assert arg.meta["val"] == asked
    graph.output(arg)
    run = fx.GraphModule({}, graph)
    for b, s in BATCHES:
        assert run(*(torch.empty(shape) for shape in shapes(b, s))) == size(b, s)


@pytest.mark.parametrize("name", FOLLOWS)
def test_a_body_reads_its_sizes_off_its_inputs(name):
    shapes, size = FOLLOWS[name]
    sizes = Sizes()
    bound = BoundSizes([InputSpec(val, False, False) for val in sizes.tensors(shapes)])
    asked = [size(*sizes.symbols), *(n for shape in shapes(*sizes.symbols) for n in shape)]
    for b, s in BATCHES:
        values = bound.read([torch.empty(shape) for shape in shapes(b, s)])
        named = dict(zip(bound.names, values, strict=True))
        wanted = [size(b, s), *(n for shape in shapes(b, s) for n in shape)]
        assert [bound.evaluate(x, named) for x in asked] == wanted


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_inputs_do_not_tell_is_not_guessed(name):
    shapes, size = UNKNOWN[name]
    sizes = Sizes()
    graph = fx.Graph()
    tensors = sizes.tensors(shapes)
    for index, val in enumerate(tensors):
        graph.placeholder(f"x{index}").meta["val"] = val
    asked = size(*sizes.symbols)
    assert SizeTable(graph).find(asked) is None
    bound = BoundSizes([InputSpec(val, False, False) for val in tensors])
    assert bound.evaluate(asked, dict.fromkeys(bound.names, 5)) is None


def test_dims_of_inputs_come_before_other_values():
    """A value that a rewrite takes away must not be where a size is read."""
    sizes = Sizes()
    graph = fx.Graph()
    x, inner, y = graph.placeholder("x"), graph.placeholder("inner"), graph.placeholder("y")
    x.meta["val"], inner.meta["val"], y.meta["val"] = sizes.tensors(
        lambda b, s: [(b, 8), (b, s), (b, s + 1)]
    )
    inner.op, inner.target = "call_function", torch.ops.aten.alias.default
    inner.args = (x,)
    arg = SizeTable(graph).arg(sizes.symbols[1])
    assert inner not in arg.all_input_nodes
    only = SizeTable(graph, [x, inner]).arg(sizes.symbols[1])
    assert only.args == (inner, 1)


def test_rows_of_a_tiled_input_are_a_name():
    sizes = Sizes()
    rows, shared = sizes.tensors(lambda b, s: [(b * s, 8), (s, 3)])
    bound = BoundSizes([InputSpec(rows, True, False), InputSpec(shared, False, False)])
    read = bound.read([torch.empty(12, 8), torch.empty(5, 3)])
    assert sorted(read) == [5, 12]
    assert read[bound.names.index("rows")] == 12
