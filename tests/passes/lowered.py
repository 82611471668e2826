"""From a function to the graph that the first pass sees, and a rewritten graph that runs."""

import re

import torch

from fxrl.capture.lower import lower
from fxrl.compile.bodies.variants import build_region
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


def runnable(gm):
    """``gm`` with its regions built op by op; takes tensors in the order of its inputs."""
    gm.meta["kernels"] = []  # the graph owns them
    for call in region_calls(gm):
        kernels = build_region(call.meta["region"], None)
        call.update_arg(1, kernels.key)
        gm.meta["kernels"].append(kernels)
    gm.recompile()
    return gm


def call(gm, **tensors):
    """Run a rewritten graph on tensors given by the names of the function's arguments."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    values = [next(v for key, v in tensors.items() if key in name) for name in names]
    result = runnable(gm)(*values)
    return result[0] if isinstance(result, (tuple, list)) else result


def plain(report):
    """The report's lines without file names and line numbers."""
    return "\n".join(re.sub(r" \[[^\]]*\.py:\d+\]", "", str(remark)) for remark in report.remarks)
