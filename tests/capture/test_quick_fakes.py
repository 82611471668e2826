"""What is answered without asking PyTorch is what PyTorch answers."""

import itertools
from functools import partial

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxrl.capture import quick_fakes
from fxrl.compile._torch import new_size
from fxrl.scoped import swapped

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


UNARY = [aten.neg, aten.exp, aten.rsqrt, aten.sigmoid, aten.silu, aten.abs, aten.tanh]
UNARY += [aten.bitwise_not]
BINARY = [aten.sub, aten.mul, aten.minimum, aten.maximum]
COMPARED = [aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge]


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


def compared(given):
    """Of whichever dtypes and layouts; truths are joined."""
    for op, x in zip(itertools.cycle(COMPARED), given.values(), strict=False):
        for number in (2, 0.5, True):
            yield lambda op=op, x=x, number=number: op.Scalar(x, number)
    names = ("dense", "each", "turned", "whole", "number", "truth")
    ops = itertools.cycle((*COMPARED, aten.bitwise_and))  # no multiple of the names
    for op, (x, y) in zip(ops, itertools.product(names, names), strict=False):
        yield lambda op=op, x=given[x], y=given[y]: op.Tensor(x, y)
    for op, x in itertools.product((aten.bitwise_and, aten.bitwise_or), ("truth", "whole")):
        yield lambda op=op, x=given[x]: op.Tensor(given["truth"], x)


def chosen(given):
    """By a truth of each, of each row, or of what is not dense; both of one dtype or of two."""
    truth = given["truth"]
    wheres = [truth, truth[0, 0], truth[..., :1], truth.transpose(1, 2), given["whole"]]
    names = ("dense", "row", "turned", "wide", "number")
    for where, x, y in itertools.product(wheres, names, names):
        yield lambda where=where, x=given[x], y=given[y]: aten.where.self(where, x, y)
    yield lambda: aten.where.self(truth[0, 0], given["number"], given["row"])
    yield lambda: aten.where.self(truth, given["row"], given["number"])
    yield lambda: aten.where.self(truth, truth, truth)


def clamped(given):
    for x in given.values():
        for least, most in ((1, None), (None, 0.2), (0, 2.5)):
            yield lambda x=x, least=least, most=most: aten.clamp.default(x, least, most)
    for x in (given["dense"], given["whole"]):
        yield lambda x=x: aten.clamp.default(x, None, None)
        yield lambda x=x: aten.clamp.default(x, 0, True)
        yield lambda x=x: aten.clamp_min.default(x, 0.2)
        yield lambda x=x: aten.clamp_max.default(x, 1)


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
                yield lambda x=x, size=size: aten._unsafe_view.default(x, size)


@pytest.mark.parametrize(
    "run", [unary, with_numbers, binary, compared, chosen, clamped, converted, viewed]
)
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
        less = aten.bitwise_and.Tensor(aten.lt.Scalar(dense, 0.5), aten.gt.Tensor(dense, row))
        aten.minimum.default(aten.clamp.default(dense, None, 1), aten.where.self(less, dense, row))
    assert set(asked) <= {aten.as_strided.default, torch.ops.prim.device.default}


def test_a_higher_order_op_knows_the_mode():
    with QUICK(), plain(), enable_python_dispatcher():
        x = torch.empty(3)
        (made,) = torch.ops.higher_order.cond(
            torch.empty((), dtype=torch.bool), lambda x: (x + 1,), lambda x: (x - 1,), (x,)
        )
    assert made.shape == (3,)
