"""Bytes that ops take inside, beside those that running them allocates."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

import fxrl.ops.context_parallel  # noqa: F401  # defines the ops
from fxrl.ir.graph import library_weight
from fxrl.ops.context_parallel import join_group
from fxrl.planner.cost import seconds
from fxrl.planner.memory_profile import MemoryProfile
from fxrl.planner.schedule import kernels
from fxrl.planner.target import TARGETS
from tests.compile.shared_sequences import silent_group


def most_allocated(work):
    """The most bytes that PyTorch has allocated at a time while ``work`` runs; its results live."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        results = work()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == "[memory]"]
    assert results
    return max(itertools.accumulate(changes))


def as_linear(*shape):
    """[B, heads, t, D], in memory [B, t, heads, D], as projections make it."""
    batch, heads, tokens, features = shape
    return torch.randn(batch, tokens, heads, features).transpose(1, 2)


CASES = {
    "q, k and v": ("seq_to_head", 2, 8, [as_linear(2, 8, 4, 16), *[as_linear(2, 4, 4, 16)] * 2]),
    "one sequence": ("seq_to_head", 4, 16, [torch.randn(1, 8, 4, 16)]),
    "tokens that 4 does not divide": ("seq_to_head", 4, 13, [as_linear(1, 8, 4, 16)]),
    "attention's result": ("head_to_seq", 2, 8, [torch.randn(2, 4, 8, 16)]),
    "gradients of q, k and v": ("head_to_seq", 4, 13, [as_linear(1, 2, 13, 16) for _ in range(3)]),
    "ranks without a token": ("head_to_seq", 4, 2, [torch.randn(1, 2, 2, 16)]),
}


@pytest.mark.parametrize("case", CASES)
def test_an_exchange_among_ranks(case):
    name, ranks, tokens, given = CASES[case]
    ids = torch.zeros(1, tokens)

    def call(ids, *x):
        return tuple(getattr(torch.ops.fxrl, name)(list(x), ids, ranks))

    with silent_group(ranks):
        join_group(ranks)
        gm = make_fx(call, tracing_mode="fake")(ids, *given)
        most = most_allocated(lambda: call(ids, *given))
    assert MemoryProfile(gm, kernels(gm)).peak(int) == most


# ---------------------------------------------------------------------------- compiled kernels
@torch.library.custom_op("fxrl_tests::codes_mm", mutates_args=())
def codes_mm(x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """As bitsandbytes': rows times a weight in four bits, which is widened inside."""
    wide = torch.cat((codes >> 4, codes & 15), -1).to(x.dtype)
    return x @ wide.T


@codes_mm.register_fake
def _(x, codes):
    return x.new_empty(*x.shape[:-1], codes.shape[0])


@torch.library.custom_op("fxrl_tests::norm", mutates_args=())
def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight)


@norm.register_fake
def _(x, weight):
    return torch.empty_like(x)


@torch.library.custom_op("fxrl_tests::attend", mutates_args=())
def attend(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ key


@attend.register_fake
def _(query, key):
    return torch.empty_like(query)


ops = torch.ops.fxrl_tests
ROWS, NARROW, WIDE = 512, 128, 192


def codes(wide=WIDE, narrow=NARROW):
    return torch.randint(0, 255, (wide, narrow // 2), dtype=torch.uint8)


def gated(x, gate, up, a, b):
    """A gated MLP whose products have adapters: what each product adds is kept."""
    gate = ops.codes_mm(x, gate) + 2 * (x @ a[0] @ b[0])
    up = ops.codes_mm(x, up) + 2 * (x @ a[1] @ b[1])
    return gate, up, torch.nn.functional.silu(gate) * up


def gated_inputs():
    narrow = [torch.randn(NARROW, 4) for _ in range(2)], [torch.randn(4, WIDE) for _ in range(2)]
    return torch.randn(ROWS, NARROW), codes(), codes(), *narrow


def test_what_a_compiled_body_allocates():
    """Kernels of values that are added late hold all that they add: Inductor runs them as one."""
    given = gated_inputs()
    gm = make_fx(gated, tracing_mode="fake")(*given)
    compiled = torch.compile(gated)
    compiled(*given)
    planned = MemoryProfile(gm, kernels(gm)).peak(int)
    assert planned == most_allocated(lambda: compiled(*given))


@pytest.mark.parametrize(
    ("op", "given", "weight"),
    [
        (ops.codes_mm, lambda: (torch.randn(2, 64, NARROW), codes()), 1),
        (ops.norm, lambda: (torch.randn(2, 64, NARROW), torch.randn(NARROW)), None),
        (ops.attend, lambda: (torch.randn(1, 16, 16), torch.randn(1, 16, 16)), None),
    ],
    ids=["a product", "a norm", "an attention whose keys have as many values as a weight"],
)
def test_a_librarys_product_is_known_by_its_operands(op, given, weight):
    given = given()
    gm = make_fx(op, tracing_mode="fake")(*given)
    (call,) = (node for node in gm.graph.nodes if node.op == "call_function")
    places = [node for node in gm.graph.nodes if node.op == "placeholder"]
    assert library_weight(call) is (None if weight is None else places[weight])
    flops = 2 * 2 * 64 * NARROW * WIDE
    target = replace(TARGETS["h200"], bandwidth=1e30, launch=0.0)
    took = seconds(kernels(gm), target, int)
    assert took == pytest.approx(14 * flops / target.product_flops if weight else 0.0)
