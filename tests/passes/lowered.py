"""From a function to the graph that the first pass sees, and a rewritten graph that runs."""

import re

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fxrl.capture.lower import lower
from fxrl.compile.bodies.variants import build_region
from fxrl.ir.graph import inputs_of
from fxrl.ir.region import region_calls
from fxrl.ir.site import name_sites
from tests.graphs import normalised


def lowered(function, *args, respelled=True):
    """The lowered graph of ``function`` on these arguments; sizes are constants.

    ``respelled``: after the passes that only respell, as those over heads and layers see it.
    """
    found = []

    def backend(gm, _):
        found.append(normalised(gm) if respelled else raw(gm))
        return gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = found
    return gm


def raw(gm):
    """The graph that the first pass of all sees."""
    graph = lower(gm)
    name_sites(graph, "0")
    return graph


def runnable(gm, options=None):
    """``gm`` with its regions built, op by op unless Inductor has ``options``; takes tensors in the
    order of its inputs."""
    gm.meta["kernels"] = []  # the graph owns them
    for call in region_calls(gm):
        kernels = build_region(call.meta["region"], options)
        call.update_arg(1, kernels.key)
        gm.meta["kernels"].append(kernels)
    gm.recompile()
    return gm


def call(gm, options=None, **tensors):
    """Run a rewritten graph on tensors given by the names of the function's arguments."""
    names = [node.name for node in inputs_of(gm.graph)]
    values = [next(v for key, v in tensors.items() if key in name) for name in names]
    result = runnable(gm, options)(*values)
    return result[0] if isinstance(result, (tuple, list)) else result


def plain(report):
    """The report's lines without file names and line numbers."""
    return "\n".join(re.sub(r" \[[^\]]*\.py:\d+\]", "", str(remark)) for remark in report.remarks)


def rewritten_by(one, function, *args, sizes="fake"):
    """The graph after one pass, whose numbers and layouts are the function's, and what was said."""
    gm = make_fx(function, tracing_mode=sizes)(*args)
    report = one.run(gm)
    gm.graph.lint()
    gm.recompile()
    for made, wanted in zip(*map(pytree.tree_leaves, (gm(*args), function(*args))), strict=True):
        torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)
        assert made.stride() == wanted.stride()
    return gm, "\n".join(remark.reason for remark in report.remarks)


def draw(*sizes, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(*sizes, generator=generator, dtype=torch.float64)


def head_inputs(seed=0):
    """Of a loss head: hidden states, the weight, and tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(32, 4, generator=generator, dtype=torch.float64).requires_grad_()
    return hidden, weight, torch.randint(0, 32, (6,), generator=generator)
