"""``fxrl::linear_logprob`` as an op: schema, fake tensors, AOTAutograd, one compile, memory."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx.experimental.proxy_tensor import make_fx

import fxrl.ops.linear_logprob  # noqa: F401  (declares the op)

sys.path.insert(0, str(Path(__file__).parent))
from linear_logprob_reference import random_head, reference

OP = torch.ops.fxrl.linear_logprob.default


def arguments(num_rows=6, *, trainable_head=False, seed=0):
    hidden, weight, target = random_head(num_rows, 9, 4, seed=seed)
    hidden.requires_grad_()
    weight.requires_grad_(trainable_head)
    temperature = torch.linspace(0.5, 2, num_rows, dtype=torch.float64).requires_grad_()
    bias = torch.linspace(-1, 1, 9, dtype=torch.float64)
    mask = torch.arange(num_rows) % 3 > 0
    return hidden, weight, target, bias, temperature, mask, 0.5, 4.0


def by_name(hidden, weight, target, *options, **more):
    """``OP`` with the values of ``arguments()``, all after the target by keyword."""
    names = ("bias", "temperature", "row_mask", "scale", "softcap")
    return (hidden, weight, target), dict(zip(names, options, strict=False)) | more


@pytest.mark.parametrize("trainable_head", [False, True])
def test_opcheck_of_the_composite(trainable_head):
    options = {
        "outputs": "logprob,entropy,argmax_hit",
        "grad_outputs": "logprob",
        "chunk_tokens": 4,
    }
    torch.library.opcheck(OP, *by_name(*arguments(trainable_head=trainable_head), **options))


@pytest.mark.parametrize("saved", [False, True])
def test_opcheck_of_the_forward(saved):
    forward = torch.ops.fxrl.linear_logprob_forward.default
    names = "logprob,lse" if saved else "logprob,entropy"
    args = (*arguments(trainable_head=not saved), 4, "logprob,lse,entropy", names, saved)
    torch.library.opcheck(forward, args)


def test_opcheck_of_the_backward_ops():
    grads = torch.randn(2, 6, dtype=torch.float64)
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in arguments()]
    values = [*-torch.rand(3, 6, dtype=torch.float64), None]
    for wants in ((True, True, True, True), (True, False, False, False)):
        args = (grads, *plain, 4, *values, "logprob,entropy", *wants)
        torch.library.opcheck(torch.ops.fxrl.linear_logprob_backward.default, args)
    vectors = torch.randn(2, 6, 3, dtype=torch.float64)
    args = (grads, vectors, torch.bfloat16)
    torch.library.opcheck(torch.ops.fxrl.linear_logprob_scale.default, args)


@pytest.mark.parametrize("trainable_head", [False, True])
def test_one_compile_serves_three_lengths(trainable_head):
    counter = CompileCounterWithBackend("aot_eager")

    def loss(hidden, weight, target, bias, temperature, mask):
        args, options = by_name(hidden, weight, target, bias, temperature, mask, 0.5, 4.0)
        out = OP(*args, **options, outputs="logprob,entropy")
        return (out[0].exp() - 0.1 * out[2]).sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=counter, dynamic=True, fullgraph=True)
    for num_rows in (5, 8, 13):
        args = arguments(num_rows, trainable_head=trainable_head, seed=num_rows)
        leaves = [a for a in args[:6] if a.requires_grad]
        made = torch.autograd.grad(compiled(*args[:6]), leaves)
        hidden, weight, target, bias, temperature, mask, scale, softcap = args
        values = reference(
            hidden,
            weight,
            target,
            bias=bias,
            temperature=temperature,
            row_mask=mask,
            scale=scale,
            softcap=softcap,
        )
        # exp(0) = 1 of a masked row is a constant: it has no gradient in either.
        truth = torch.autograd.grad(
            (values["logprob"].exp() - 0.1 * values["entropy"]).sum(), leaves
        )
        for ours, theirs in zip(made, truth, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    assert counter.frame_count == 1


def traced_targets(mode_args, *, grad):
    """The fxrl ops that AOTAutograd leaves in the forward graph of ``OP(...)[0].sum()``."""
    seen = []

    def record(gm, _):
        seen.extend(str(n.target) for n in gm.graph.nodes if "fxrl" in str(n.target))
        return gm.forward

    from functorch.compile import aot_function, make_boxed_func

    def compiler(gm, example):
        return make_boxed_func(record(gm, example))

    def loss(*args):
        given, options = by_name(*args)
        return OP(*given, **options)[0].sum()

    run = aot_function(loss, fw_compiler=compiler)
    with torch.set_grad_enabled(grad):
        out = run(*mode_args[:6])
        if grad:
            out.backward()
    return seen


def test_only_training_pays_for_saved_vectors():
    training = traced_targets(arguments(), grad=True)
    scoring = traced_targets(arguments(), grad=False)
    assert training == ["fxrl.linear_logprob_forward.default", "fxrl.linear_logprob_scale.default"]
    assert scoring == ["fxrl.linear_logprob_forward.default"]


def test_a_symbolic_trace_keeps_the_op_and_its_row_count():
    hidden, weight, target = random_head(6, 9, 4)

    def run(hidden, weight, target):
        return OP(hidden, weight, target, outputs="logprob,max_logit")[0]

    graph = make_fx(run, tracing_mode="symbolic", pre_dispatch=True)(hidden, weight, target)
    shape = graph.graph.find_nodes(op="output")[0].args[0].meta["val"].shape
    assert isinstance(shape[0], torch.SymInt)
    longer = random_head(10, 9, 4, seed=1)
    torch.testing.assert_close(graph(*longer), run(*longer))


PEAK = """
import ctypes, gc, torch
from fxrl.ops.linear_logprob import linear_logprob

def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

def step(weight, num_rows):
    hidden = torch.randn(num_rows, 64, requires_grad=True)
    target = torch.randint(0, 50000, (num_rows,))
    out = linear_logprob(hidden, weight, target, outputs=["logprob", "entropy"])
    (out.logprob.exp() - 0.01 * out.entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()

def peak(weight):
    step(weight, 16)
    weight.grad = None
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    base = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    step(weight, 2048)
    return status("VmHWM") - base

print(*(peak(torch.randn(50000, 64, requires_grad=trained)) for trained in (False, True)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_is_some_tiles_and_not_the_logits():
    """With a frozen head and a trainable one."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PEAK], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    # One [N, V] float32 is 391 MiB; plain PyTorch takes 1950 MiB for this.
    frozen, trainable = map(float, done.stdout.split())
    assert frozen <= 250
    assert trainable <= 250
