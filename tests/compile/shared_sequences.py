"""Models, losses and batches for the tests of sequences that ranks share, and ranks to run them.

Steps are captured here, in one process, under a process group that sends nothing; forked ranks
then only run them. So a capture is paid for once and not by each rank.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing import get_context
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from fxrl.compile import backend
from fxrl.ops import context_parallel
from fxrl.ops.context_parallel import join_group
from tests.forked import need_autograd_in_forks

VOCAB = 29


class Layer(nn.Module):
    """Grouped queries, a gated MLP."""

    def __init__(self, hidden: int, heads: int, groups: int):
        super().__init__()
        self.heads, self.groups = heads, groups
        self.norm = nn.LayerNorm(hidden)
        self.q = nn.Linear(hidden, hidden)
        self.kv = nn.Linear(hidden, 2 * groups * (hidden // heads))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 2 * hidden)
        self.down = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        rows, tokens, hidden = x.shape
        n = self.norm(x)
        q = self.q(n).view(rows, tokens, self.heads, -1).transpose(1, 2)
        k, v = self.kv(n).view(rows, tokens, 2 * self.groups, -1).transpose(1, 2).chunk(2, 1)
        o = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        x = x + self.o(o.transpose(1, 2).reshape(rows, tokens, hidden))
        up, gate = self.up(x).chunk(2, -1)
        return x + self.down(up * F.silu(gate))


class Model(nn.Module):
    """A small decoder whose logits are [B, T, VOCAB]; ``groups`` heads of keys of ``heads``."""

    def __init__(
        self,
        hidden: int = 24,
        heads: int = 4,
        groups: int = 2,
        layers: int = 1,
        slopes: int = 0,
        checkpointed: bool = False,
    ):
        super().__init__()
        self.checkpointed = checkpointed
        torch.manual_seed(0)
        self.slopes = nn.Parameter(torch.rand(slopes, 1, 1)) if slopes else None
        self.embed = nn.Embedding(VOCAB, hidden)
        self.place = nn.Embedding(32, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, groups) for _ in range(layers))
        self.head = nn.Linear(hidden, VOCAB)
        self.value = nn.Linear(hidden, 1)
        self.double()

    def hidden(self, batch: dict[str, Tensor]) -> Tensor:
        ids, seen = batch["input_ids"], batch.get("attention_mask")
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        x = x + batch["shift"] * batch["scale"] if "shift" in batch else x
        mask = None
        if seen is not None:
            causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            mask = causal & (seen[:, None, None, :] != 0) | torch.eye(ids.shape[1]).bool()
        if self.slopes is not None:  # of attention's biases, one for each head or one for all
            places = torch.arange(ids.shape[1])
            ahead = places[None, :] > places[:, None]
            mask = (self.slopes * (places[None, :] - places[:, None])).masked_fill(
                ahead, -torch.inf
            )
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, mask, use_reentrant=False)
            else:
                x = layer(x, mask)
        return x

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.head(self.hidden(batch))


def batch_of(tokens: int, rows: int = 3, *, padded: bool = False) -> dict[str, Tensor]:
    """Random ids and what losses read, of ``tokens`` - 1 columns; ``padded`` on the left."""
    draw = torch.Generator().manual_seed(tokens)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    batch = {
        "input_ids": torch.randint(0, VOCAB, (rows, tokens), generator=draw),
        "old": noise(rows, tokens - 1) - 3,
        "advantages": noise(rows),
        "mask": torch.rand(rows, tokens - 1, generator=draw) > 0.3,
    }
    if padded:
        batch["attention_mask"] = torch.arange(tokens) >= torch.arange(rows)[:, None]
    return batch


# ---------------------------------------------------------------------------- ranks
@contextmanager
def silent_group(ranks: int) -> Iterator[None]:
    """This process as the first of ``ranks``, whose collectives send nothing, and who say what it
    says; on one thread, as the ranks will be, for Dynamo guards the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module in (backend, context_parallel):
                patch.setattr(module, "told_by_ranks", lambda value, ranks: [value] * ranks)
            yield
    finally:
        dist.destroy_process_group()
        torch.set_num_threads(threads)


def in_ranks(ranks: int, work: Callable[[], Any]) -> list[Any]:
    """What ``work`` returns (JSON) in each of ``ranks`` forked processes that share sequences."""
    need_autograd_in_forks()
    with tempfile.TemporaryDirectory() as folder:
        fork = get_context("fork")
        processes = [
            fork.Process(target=_run, args=(Path(folder), rank, ranks, work))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        assert codes == [0] * ranks, f"ranks ended with {codes}"
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]


def _run(folder: Path, rank: int, ranks: int, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", rank=rank, world_size=ranks, store=store)
    for sharing in range(2, ranks + 1):
        if ranks % sharing == 0:
            join_group(sharing)
    (folder / str(rank)).write_text(json.dumps(work()))
    dist.barrier()
    os._exit(0)  # nothing of the tests' process ends here
