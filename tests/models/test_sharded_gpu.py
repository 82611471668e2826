"""Weights that ranks share out on GPUs: copies on a stream of their own, and another's memory."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from fxrl.models import shard
from fxrl.ops import sharded as sharded_ops
from fxrl.ops.linear_logprob import linear_logprob
from fxrl.ops.piecewise_head import PART, Held
from tests.models.test_sharded import draw, frozen, in_parts, product, same, three_steps

pytestmark = pytest.mark.gpu


def test_the_next_weight_comes_while_one_is_read():
    """Products long enough that a copy too early would overwrite what is read."""
    weights = [draw(2048, 2048, seed=i, dtype=torch.bfloat16).cuda() for i in range(6)]
    shards, parts = in_parts(*weights, device="cuda")
    rows = draw(8192, 2048, seed=9, dtype=torch.bfloat16).cuda()
    order = [*range(6), *reversed(range(6))]
    wrong = random.Random(0).choices(range(6), k=40)
    for i in [*order * 6, *wrong, *order * 2]:
        assert product(rows, parts[i], weights[i]).equal(rows @ weights[i].t())
    assert 60 < shards.expected < shards.fetched


def test_a_vocabulary_comes_in_pieces(monkeypatch):
    """Of 13 pieces, each is read while the next comes."""
    monkeypatch.setattr(sharded_ops, "PIECE", 1024 * 2048 * 2)
    weight = draw(13000, 2048, dtype=torch.bfloat16).cuda() / 16
    _shards, (part,) = in_parts(weight, device="cuda")
    ids = torch.arange(0, 13000, 3, device="cuda")
    assert torch.ops.fxrl.sharded_rows(ids, [part], 13000, weight.dtype, "").equal(weight[ids])
    hidden = draw(len(ids), 2048, seed=1, dtype=torch.bfloat16).cuda().requires_grad_()
    (whole, *_), (made, *_) = (
        linear_logprob(hidden, weight, ids),
        torch.ops.fxrl.piecewise_logprob(
            hidden, part, ids, **Held(None, PART, 13000, weight.dtype)._asdict()
        ),
    )
    torch.testing.assert_close(made, whole, rtol=1e-4, atol=1e-4)
    ours, theirs = (torch.autograd.grad(y.sum(), hidden)[0] for y in (made, whole))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def run(rank, folder):
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    made = three_steps(shard(frozen().cuda()))
    (folder / str(rank)).write_text(json.dumps(made))
    dist.barrier()  # the other may read this one's memory still
    dist.destroy_process_group()


def test_two_processes_map_each_others_memory(tmp_path):
    """Of two GPUs, or of one."""
    multiprocessing.spawn(run, (tmp_path,), nprocs=2)
    expected = three_steps(frozen(), optimized=False)
    for rank in range(2):
        same(json.loads((tmp_path / str(rank)).read_text()), expected)
