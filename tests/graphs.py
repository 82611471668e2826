"""Graphs to look at, and rewrites to try."""

from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from fxrl.capture.dynamic import mark_batch
from fxrl.capture.lower import lower
from fxrl.ir.bodies import clone
from fxrl.ir.graph import is_tensor
from fxrl.ir.graph_pass import Applied, Pass, Site, Stage
from fxrl.ir.pipeline import Pipeline
from fxrl.ir.plan import Plan
from fxrl.ir.site import name_sites, plain_path
from fxrl.passes import REGISTRY


def lowered_graph(model, loss_fn, batch):
    """The graph that passes over heads and layers see for this model, loss and batch."""
    graphs = []

    def keep(gm, _):
        graphs.append(normalised(gm))
        return gm.forward

    mark_batch(batch)
    torch.compile(lambda b: loss_fn(model, b), backend=keep, fullgraph=True)(batch)
    return graphs[-1]


def normalised(gm):
    """A Dynamo graph lowered, its sites named, and respelled by the passes that only do that."""
    lowered = lower(gm)
    name_sites(lowered, "0")
    respell = [one() for one in REGISTRY.values() if one.stage == Stage.NORMALISE]
    return Pipeline(tuple(respell)).run(clone(lowered), Plan()).gm


def nodes_of_module(graph, path):
    """Nodes that a submodule made, by the end of its path: ``layers.0`` or ``layers.0.mlp``."""
    found = []
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        if any(f".{plain_path(where)}".endswith(f".{path}") for where, _ in stack.values()):
            found.append(node)
    return found


@contextmanager
def registered_rewrite(rewrite, name="test-rewrite"):
    """A pass that applies ``rewrite`` to each graph; its name is for ``Config(passes=(name,))``."""

    @dataclass(frozen=True)
    class TestRewrite(Pass[Site]):
        name: ClassVar[str]

        def match(self, gm):
            anchor = next(
                (n for n in gm.graph.nodes if is_tensor(n) and n.op != "placeholder"), None
            )
            if anchor is not None:
                yield Site(anchor, 0)

        def rewrite(self, gm, site, choice):
            rewrite(gm)
            return Applied("rewritten by a test")

    TestRewrite.name = name
    REGISTRY[name] = TestRewrite
    try:
        yield name
    finally:
        del REGISTRY[name]
