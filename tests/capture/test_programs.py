"""Programs that nobody wrote: a model, a loss and calls drawn from a seed, beside eager.

What each piece does alone other tests tell. Here they meet: what writes buffers and Python's
objects, in layers that are checkpointed or not, with branches, breaks and checks around the head,
over calls that train, score and accumulate. All that a call leaves is compared.
"""

from __future__ import annotations

import copy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxrl.config import Config
from fxrl.step import optimize
from tests.capture.mixer import VOCAB, make_batch

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
#: Lines that a program may have. ``x`` is a layer's input, ``z`` are logits, ``lp`` log-probs, and
#: ``s`` is a sum that goes into the loss.
STATE = """pass
self.calls += 1
self.hits.add_(1)
self.seen.append(x.shape[1])
self.last = x.detach().sum()
with torch.no_grad(): self.mean.lerp_(x.mean((0, 1)), 0.1)
G['layers'] = G.get('layers', 0) + 1"""
CALLS = """x = layer(x)
x = checkpoint(layer, x, use_reentrant=False)
x = x + checkpoint(layer.mlp, x, use_reentrant=False)"""
LOGITS = """z = 5 * torch.tanh(z / 5)
z = z.clone(); z[..., :2] = -20.0
z = z * batch['scale']
z = z.masked_fill(torch.arange(z.shape[-1]) == 3, -9.0)"""
LOGPROBS = """lp = z.log_softmax(-1).gather(-1, y[..., None])[..., 0]
lp = -F.cross_entropy(z.transpose(1, 2), y, reduction='none')
lp = torch.stack([r.log_softmax(-1).gather(-1, t[:, None])[:, 0] for r, t in zip(z, y)])
lp = checkpoint(lambda z: -F.cross_entropy(z.mT, y, reduction='none'), z, use_reentrant=False)"""
STATEMENTS = """G['steps'] = G.get('steps', 0) + 1
model.calls += 1
model.seen.append(len(G))
s = s + (lp - batch['scale']).clamp(-1, 1).mean()
s = s - (z.softmax(-1) * z.log_softmax(-1)).sum(-1).mean()
s = s * 2 if lp.mean() < -3.5 else s + lp.sum()
s = s + sum(float(row.sum()) for row in lp.detach()) * 0.1
torch._dynamo.graph_break()
torch._dynamo.mark_static_address(torch.zeros(1))  # which no graph may hold
lp = lp + 0.01 * torch.randn_like(lp)
G['low'] = lp.detach().min()
s = s + Doubled.apply(lp).mean()
s = s + torch.func.grad(lambda q: q.exp().sum())(lp.detach()).mul(lp).mean()
s = s + torch.cond(lp.sum() > -9, lambda v: v * 2, lambda v: v * 3, (lp,)).mean()
if not torch.isfinite(lp).all(): raise ValueError('not finite')
for i in range(int(batch['mask'].sum(1).max()) % 3): s = s + lp[:, i].mean()
lp.register_hook(lambda g: g * 1.5) if lp.requires_grad else None"""
PROGRAM = f"""
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
G = {{{{}}}}
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 1.0
    @staticmethod
    def backward(ctx, grad): return grad * 2
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.last = 0, [], None
        self.register_buffer("hits", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))
class Layer(Counting):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
    def mlp(self, x): return self.down(F.silu(self.up(x.cumsum(1) / x.shape[1])))
    def forward(self, x):
        {{state}}
        return x + self.mlp(x)
class Model(Counting):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding({VOCAB}, 8), nn.Linear(8, {VOCAB}, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            {{call}}
        return self.head(x)
def loss_fn(model, batch):
    ids, s = batch["ids"], 0.0
    y, z = ids[:, 1:], model(ids)[:, :-1]
    {{body}}
    return -(lp * batch["mask"]).sum() / batch["mask"].sum() + 0.1 * s
"""


def outcome(seed: int, path: Path, *, optimized: bool) -> list[Any]:
    """What each call of the seed's program leaves."""
    random = Random(seed)
    drawn = [*random.sample(LOGITS.split("\n"), random.choice((0, 0, 1, 2)))]
    drawn.append(random.choice(LOGPROBS.split("\n")))
    drawn += random.sample(STATEMENTS.split("\n"), random.choice((1, 2, 3, 5)))
    state, call = (random.choice(lines.split("\n")) for lines in (STATE, CALLS))
    path.write_text(PROGRAM.format(state=state, call=call, body="\n    ".join(drawn)))
    program: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(), path, "exec"), program)
    torch.manual_seed(0)
    model, loss_fn, found = program["Model"]().double(), program["loss_fn"], []
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    config = Config(min_saved_bytes=0, chunk_tokens=4, compile_regions=False, on_miss="ignore")
    step = optimize(model, loss_fn, config)
    for number in range(4):
        batch = make_batch(random.choice((2, 3)), random.choice((5, 7, 9)), seed=number)
        batch["scale"] = torch.tensor(random.choice((0.7, 1.2)), dtype=torch.float64)
        batch["mask"][:, 0] = True
        model.train(random.random() < 0.8)
        how = random.choice(("train", "train", "twice", "score"))
        with torch.set_grad_enabled(how != "score"):
            loss = step(batch) if optimized else loss_fn(model, batch)
        for _ in range({"score": 0, "train": 1, "twice": 2}[how]):
            loss.backward(retain_graph=True)
        left = {"loss": loss, "G": program["G"], "random": torch.get_rng_state()}
        left |= {f"{name}.grad": one.grad for name, one in model.named_parameters()}
        left |= dict(model.named_buffers())
        for name, one in model.named_modules():
            left |= {
                f"{name}.{k}": v for k, v in vars(one).items() if k in ("calls", "seen", "last")
            }
        plain = {k: v.detach() if isinstance(v, Tensor) else v for k, v in left.items()}
        found.append(copy.deepcopy(plain))
        if random.random() < 0.5:
            model.zero_grad()
    return found


SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 24))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_of_many_pieces_is_eagers(seed: int, tmp_path: Path) -> None:
    wanted, got = (
        outcome(seed, tmp_path / f"program_{optimized}.py", optimized=optimized)
        for optimized in (False, True)
    )
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
