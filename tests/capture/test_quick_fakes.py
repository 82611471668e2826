"""What is answered without asking PyTorch is what PyTorch answers."""

import itertools
from functools import partial

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxrl.capture import quick_fakes
from fxrl.capture._torch import swapped
from fxrl.compile._torch import new_size

aten, prims = torch.ops.aten, torch.ops.prims
((_, _, DISPATCH),) = quick_fakes.REPLACED
QUICK = partial(swapped, FakeTensorMode, dispatch=DISPATCH)


def plain():
    return FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)


def tensors(mode):
    """By name: of two sizes that vary, dense and not."""
    rows, tokens = new_size(mode, "rows", 3), new_size(mode, "tokens", 7)
    dense = torch.empty(rows, tokens, 8, dtype=torch.bfloat16)
    return {
        "dense": dense,
        "flat": torch.empty(rows * tokens, 8, dtype=torch.bfloat16),
        "row": torch.empty(8, dtype=torch.bfloat16),
        "each": torch.empty(rows, tokens, 1, dtype=torch.bfloat16),
        "wide": torch.empty(rows, tokens, 8),
        "whole": torch.empty(rows, tokens, 8, dtype=torch.int64),
        "truth": torch.empty(rows, tokens, 8, dtype=torch.bool),
        "number": torch.empty((), dtype=torch.bfloat16),
        "nothing": torch.empty(0, tokens, 8, dtype=torch.bfloat16),
        "turned": dense.transpose(1, 2),
        "later": dense[1:],
        "part": dense[:, 1:],
        "apart": torch.empty(rows, tokens, 16, dtype=torch.bfloat16)[..., ::2],
        "again": torch.empty(8, dtype=torch.bfloat16).expand(rows, tokens, 8),
        "one": torch.empty(1, tokens, 8, dtype=torch.bfloat16).as_strided(
            (1, tokens, 8), (5, 8, 1)
        ),
    }


def looks(mode, run):
    """What ops give in a mode, and what they take for granted about sizes."""
    with mode, enable_python_dispatcher():
        found = []
        for make in run(tensors(mode)):
            try:
                x = make()
            except Exception as error:  # which PyTorch raises in either mode
                found.append(type(error))
                continue
            assert type(x) is FakeTensor
            numbers = (*x.shape, *x.stride(), x.storage_offset())
            found.append((x.dtype, x.device, [str(n) for n in numbers]))
        return found, {str(guard.expr) for guard in mode.shape_env.guards}


UNARY = [aten.neg, aten.exp, aten.rsqrt, aten.sigmoid, aten.silu]
BINARY = [aten.sub, aten.mul]


def unary(given):
    for op, x in itertools.product(UNARY, given.values()):
        yield lambda op=op, x=x: op.default(x)


def with_numbers(given):
    for x, number in itertools.product(given.values(), (2, 0.5, True)):
        for op in (aten.mul.Scalar, aten.div.Scalar, aten.pow.Tensor_Scalar, aten.add.Tensor):
            yield lambda op=op, x=x, number=number: op(x, number)


def binary(given):
    first = ("dense", "flat", "row", "each", "turned", "apart")
    second = (*first, "wide", "whole", "number", "part", "again", "one")
    for op, x, y in itertools.product(BINARY, first, second):
        yield lambda op=op, x=given[x], y=given[y]: op.Tensor(x, y)
    for op, y in ((aten.add, given["dense"]), (aten.div, given["row"])):
        yield lambda op=op, y=y: op.Tensor(given["dense"], y)
    yield lambda: aten.add.Tensor(given["dense"], given["dense"], alpha=2)


def converted(given):
    for x, dtype in itertools.product(given.values(), (torch.float32, torch.bfloat16, torch.int32)):
        yield lambda x=x, dtype=dtype: prims.convert_element_type.default(x, dtype)


def viewed(given):
    rows, tokens, _ = given["dense"].shape
    for x in given.values():
        for size in (
            [rows * tokens, 8],
            [rows, tokens, 8],
            [rows, tokens, 2, 4],
            [rows, 1, tokens, 8],
            [rows * tokens * 8],
            [-1, 8],
            [tokens, 8],
            [8],
            [],
            [0, tokens * 8],
        ):
            if x.numel() is not None:
                yield lambda x=x, size=size: aten.view.default(x, size)


@pytest.mark.parametrize("run", [unary, with_numbers, binary, converted, viewed])
def test_answers_are_pytorchs(run):
    expected, assumed = looks(plain(), run)
    with QUICK():
        found, taken = looks(plain(), run)
    assert found == expected
    assert taken <= assumed


def test_what_it_knows_it_does_not_ask(monkeypatch):
    mode = plain()
    with QUICK(), mode, enable_python_dispatcher():
        given = tensors(mode)
        asked, ask = [], quick_fakes._ask
        monkeypatch.setattr(
            quick_fakes,
            "_ask",
            lambda self, func, *rest: asked.append(func) or ask(self, func, *rest),
        )
        dense, row = given["dense"], given["row"]
        aten.view.default(dense, [dense.shape[0] * dense.shape[1], 8])
        aten.mul.Tensor(aten.add.Tensor(dense, dense), row)
        prims.convert_element_type.default(dense, torch.float32)
    assert set(asked) <= {aten.as_strided.default, torch.ops.prim.device.default}


def test_a_higher_order_op_knows_the_mode():
    with QUICK(), plain(), enable_python_dispatcher():
        x = torch.empty(3)
        (made,) = torch.ops.higher_order.cond(
            torch.empty((), dtype=torch.bool), lambda x: (x + 1,), lambda x: (x - 1,), (x,)
        )
    assert made.shape == (3,)
