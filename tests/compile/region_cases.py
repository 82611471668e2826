"""Models and losses for the tests of regions."""

import torch
from torch import nn


class Mlp(nn.Module):
    """SwiGLU over ``[B, T, H]`` with a residual, between an embedding and a head."""

    def __init__(self, vocab=50, hidden=16, inner=64, layers=1):
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.mlps = nn.ModuleList(SwiGlu(hidden, inner) for _ in range(layers))
        self.head = nn.Linear(hidden, 3)

    def forward(self, ids):
        x = self.embed(ids)
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x)


class SwiGlu(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False)
        self.up = nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def ids_batch(rows, length, vocab=50, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, vocab, (rows, length), generator=generator)}


def square_loss(model, batch):
    return model(batch["ids"]).square().mean()


def saved_bytes(function, without=()):
    """Bytes that autograd keeps for the backward of ``function()``, each storage once.

    Storages whose address is in ``without`` do not count.
    """
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in without:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    del result
    return sum(storages.values())
