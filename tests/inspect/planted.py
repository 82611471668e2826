"""A mistake that no pass makes."""

import torch

import fxrl.compile.backend


def plant_wrong_lowering(monkeypatch):
    """From now on lowering turns the one ``tanh`` of a graph into ``sin``."""
    right = fxrl.compile.backend.lower

    def wrong(gm, **options):
        lowered = right(gm, **options)
        (tanh,) = lowered.graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)
        tanh.target = torch.ops.aten.sin.default
        lowered.recompile()
        return lowered

    monkeypatch.setattr(fxrl.compile.backend, "lower", wrong)
