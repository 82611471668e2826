"""Traces that the next process reads: the same graphs and numbers, and no file for any other."""

import gc
import os

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import fxrl
from fxrl.compile._torch import guards_of, new_size, symbolic_mode
from fxrl.compile.bodies import trace, trace_cache
from fxrl.compile.bodies.trace_cache import cached_trace
from fxrl.ir.graph import tensor_val
from fxrl.ir.printer import print_graph
from tests.passes.layered import Block, GatedBlock, ids_batch, make_stack, square_loss


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where traces are kept; there are none yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path / "fxrl"


# ---------------------------------------------------------------------------- whole steps
def first_steps(block=GatedBlock, compiled=False, dtype=torch.float64, **options):
    """The numbers of two steps and the bodies as text; nobody holds what was traced before."""
    torch._dynamo.reset()
    gc.collect()
    model = make_stack(block=block, **options).to(dtype)
    config = fxrl.Config(
        passes=("outline-layers", "recompute"), compile_regions=compiled, on_miss="error"
    )
    step = fxrl.optimize(model, square_loss, config)
    numbers = []
    for batch in (ids_batch(), ids_batch(3, 7)):
        loss = step(batch)
        loss.backward()
        numbers.append(loss.detach())
    numbers += [p.grad for p in model.parameters() if p.requires_grad]
    bodies = [kernels.traced for kernels in step.captures[0].kernels.values()]
    return numbers, [print_graph(half) for one in bodies for half in one.graphs[:2]]


class Sums(nn.Module):
    """Two in a row; little for a compiler to do."""

    def __init__(self, width):
        super().__init__()
        self.tiny, self.wide = (nn.Parameter(torch.rand(width)) for _ in range(2))

    def forward(self, x):
        return x + (x * self.wide + self.tiny)


CASES = {
    "adapters": {"block": GatedBlock},
    "bf16, where roundings are marked": {
        "block": Sums,
        "dtype": torch.bfloat16,
        "compiled": True,
    },
    "checkpointed by the user": {"block": Block, "checkpointed": True},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_what_is_read_is_what_was_traced(options, monkeypatch):
    numbers, bodies = first_steps(**options)

    def refuse(*args, **options):
        raise AssertionError("this is traced, and not read")

    monkeypatch.setattr(trace, "make_fx", refuse)
    counters["inductor"].clear()
    again, read = first_steps(**options)
    assert read == bodies
    assert all(map(torch.equal, again, numbers))
    # To the letter, by which Inductor knows what it has compiled.
    assert not counters["inductor"]["fxgraph_cache_miss"]
    assert bool(counters["inductor"]["fxgraph_cache_hit"]) == options.get("compiled", False)


# ---------------------------------------------------------------------------- graphs by themselves
def product(x):
    return (x * 2).t() @ x


def views(x):
    y = x.exp()
    return y.view(-1), y[:, 1:], x.sin(), y.permute(1, 0)


def of_rows(rows):
    """A mode, and a fake tensor of [rows, 8] in it, whose rows vary."""
    mode = symbolic_mode()
    size = new_size(mode, "0", rows)
    with mode:
        return mode, torch.empty(size, 8)


def traced_in(mode, function, x):
    with mode:
        return make_fx(function)(x)


def kept(function, rows=6, asked=None, body=None):
    """The graph of a function of [rows, 8], and whether it was traced."""
    mode, x = of_rows(rows)
    calls = []

    def make():
        calls.append(1)
        return traced_in(mode, function, x)

    if body is None:
        own, like = of_rows(rows)
        body = traced_in(own, function, like)
    return cached_trace(body, [asked], [x], mode, make), len(calls) == 1, mode


def memory_of(gm):
    """For each value the first one that lies in the same memory."""
    vals = [val for node in gm.graph.nodes if (val := tensor_val(node)) is not None]
    places = [val.untyped_storage()._cdata for val in vals]
    return [places.index(place) for place in places]


@pytest.mark.parametrize("function", [product, views])
def test_a_graph_is_read_with_its_values(function):
    told, traced, _ = kept(function)
    assert traced
    read, traced, mode = kept(function, rows=9)
    assert not traced
    assert print_graph(read) == print_graph(told)
    assert [node.name for node in read.graph.nodes] == [node.name for node in told.graph.nodes]
    # Inductor writes into what nobody reads any more, which a view of it would show.
    assert memory_of(read) == memory_of(told)
    for node, before in zip(read.graph.nodes, told.graph.nodes, strict=True):
        if (val := tensor_val(node)) is not None:
            assert val.fake_mode is mode
            assert str(val.stride()) == str(tensor_val(before).stride())
            assert val.storage_offset() == tensor_val(before).storage_offset()
    x = torch.randn(9, 8)
    for found, wanted in zip(list(read(x)), list(function(x)), strict=True):
        assert torch.equal(found, wanted)


def assumes(x):
    return x * 2 if x.shape[0] > 4 else x * 3


def seen_otherwise(x):
    return x.sin().view(torch.int32)


@torch.library.custom_op("trace_cache_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)


def of_the_users(x):
    return twice(x)


def holds_a_constant(x):
    return x[:, torch.tensor([1, 0])]


def with_a_graph_inside(x):
    return torch.ops.higher_order.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@pytest.mark.parametrize(
    "function", [assumes, seen_otherwise, of_the_users, holds_a_constant, with_a_graph_inside]
)
def test_what_a_file_would_not_tell_is_traced_anew(function, folder):
    for _ in range(2):
        assert kept(function)[1]
    assert not folder.exists() or not [*folder.iterdir()]
    assert kept(product)[1]
    assert [*folder.iterdir()]


def test_a_body_whose_ops_are_the_users_is_traced_anew(folder):
    """What such an op is made of may be all known, and others when the next process begins."""
    body = fx.Graph()
    body.output(body.call_function(torch.ops.trace_cache_tests.twice, (body.placeholder("x"),)))
    for _ in range(2):
        assert kept(product, body=fx.GraphModule({}, body))[1]
    assert not folder.exists()


def test_what_was_assumed_before_a_trace_counts():
    """It asks no second time, and takes the way that these sizes take."""
    for rows, factor in ((6, 2.0), (3, 3.0)):
        mode, x = of_rows(rows)
        body = traced_in(of_rows(5)[0], torch.exp, torch.empty(3))  # whose text tells nothing
        assert bool(x.shape[0] > 4) is (rows > 4)
        gm = cached_trace(body, [], [x], mode, lambda m=mode, x=x: traced_in(m, assumes, x))
        assert torch.equal(gm(torch.ones(rows, 8)), torch.full((rows, 8), factor))
        assert guards_of(mode)


def test_what_a_trace_depends_on_is_told_apart(monkeypatch):
    assert kept(product)[1]
    assert kept(product, asked="another")[1]
    with sdpa_kernel(SDPBackend.MATH):
        assert kept(product)[1]
    with torch._inductor.config.patch(fallback_random=True):
        assert kept(product)[1]
    monkeypatch.setattr(trace_cache, "_program", lambda: "other files")
    assert kept(product)[1]
    assert not kept(product)[1]


@pytest.mark.parametrize("bytes_left", [0, 100])
def test_a_damaged_file_is_made_anew(bytes_left, folder, caplog):
    kept(product)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    os.truncate(file, bytes_left)
    assert kept(product)[1]
    assert str(file) in caplog.text
    assert file.read_bytes() == whole
    assert not kept(product)[1]


@pytest.mark.parametrize("setting", ["fx_graph_cache", "force_disable_caches"])
def test_where_inductor_keeps_nothing_nor_does_this(setting, folder):
    with torch._inductor.config.patch({setting: setting == "force_disable_caches"}):
        assert kept(product)[1]
        assert kept(product)[1]
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path, monkeypatch):
    (tmp_path / "fxrl").write_text("in the way")
    for _ in range(2):
        assert kept(product)[1]
