"""From a function to the graph that the first pass sees, and a rewritten graph that runs."""

import torch

from fxrl.capture.lower import lower
from fxrl.compile.regions import build_region
from fxrl.ir.plan import Plan
from fxrl.ir.region import regions_of

#: A plan that rewrites everything, in tiles of two rows.
EVERYTHING = Plan(chunk_tokens=2)


def lowered(function, *args):
    """The lowered graph of ``function`` on these arguments; sizes are constants."""
    found = []

    def backend(gm, _):
        found.append(lower(gm))
        return gm.forward

    torch.compiler.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    (gm,) = found
    return gm


def runnable(gm):
    """``gm`` with its regions built op by op; takes tensors in the order of its inputs."""
    for region in regions_of(gm).values():
        build_region(region, None)
    return gm


def call(gm, **tensors):
    """Run a rewritten graph on tensors given by the names of the function's arguments."""
    names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    values = [next(v for key, v in tensors.items() if key in name) for name in names]
    result = runnable(gm)(*values)
    return result[0] if isinstance(result, (tuple, list)) else result
