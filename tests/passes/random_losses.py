"""Random losses: a grammar of token-wise and vocab-reducing ops, and their graphs without Dynamo.

A program is drawn by calling a ``Draw``; it builds an fx graph of plain torch calls, which is both
the eager reference (run it) and what the lowering gets (the same nodes Dynamo would record).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fxrl.capture.lower import lower
from fxrl.config import Config
from fxrl.ir.graph import inputs_of
from fxrl.ir.plan import Plan
from fxrl.ir.remark import Report
from fxrl.ir.site import name_sites
from fxrl.passes import pipeline
from tests.passes.lowered import runnable

FEATURES, VOCAB = 4, 13
ARGUMENTS = ("hidden", "weight", "weight2", "ids", "bias", "column", "full")
LEAVES = ("hidden", "weight", "weight2", "bias", "column")

#: Chooses one of a sequence.
Draw = Callable[[Any], Any]


def make_inputs(
    batch: int = 3, length: int = 5, seed: int = 0, trained: tuple[str, ...] = LEAVES
) -> list[torch.Tensor]:
    """Inputs in the order of ``ARGUMENTS``; float64."""
    g = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=g, dtype=torch.float64)

    values = {
        "hidden": normal(batch, length, FEATURES),
        "weight": normal(VOCAB, FEATURES),
        "weight2": normal(VOCAB, FEATURES),
        "ids": torch.randint(0, VOCAB, (batch, length), generator=g),
        "bias": normal(VOCAB),
        "column": normal(batch, length),
        "full": normal(batch, length, VOCAB),
    }
    for name in trained:
        values[name].requires_grad_()
    return [values[name] for name in ARGUMENTS]


# ---------------------------------------------------------------- the grammar
#: Row selections of [B, T, ...] tensors; each keeps whole rows.
SELECTIONS: dict[str, Callable] = {
    "all": lambda x: x,
    "drop_last": lambda x: x[:, :-1],
    "drop_first": lambda x: x[:, 1:],
    "tail": lambda x: x[:, -3:-1],
    "every_second": lambda x: x[:, ::2],
    "flat": lambda x: x.flatten(0, 1),
    "swapped": lambda x: x.transpose(0, 1),
    "swapped_tail": lambda x: x.transpose(0, 1)[2:],
    "last": lambda x: x[:, -1],
    "sequence": lambda x: x[1],
    "picked": lambda x: x[:, [2, 0, 2]],
    "second_half": lambda x: x.split(2, 1)[1],
}

#: wide -> wide, every token on its own
WIDE: dict[str, Callable] = {
    "tanh": torch.tanh,
    "scale": lambda z: z * 0.7,
    "divide": lambda z: z / 1.3,
    "shift": lambda z: z + 0.3,
    "rsub": lambda z: 1 - z,
    "softcap": lambda z: 2.0 * torch.tanh(z / 2.0),
    "exp": lambda z: torch.exp(torch.tanh(z)),
    "sigmoid": torch.sigmoid,
    "square": lambda z: torch.tanh(z).square(),
    "relu": torch.relu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "abs": torch.abs,
    "clamp": lambda z: z.clamp(-1.0, 1.0),
    "log_softmax": lambda z: z.log_softmax(-1),
    "softmax": lambda z: z.softmax(-1),
    "entr": lambda z: torch.special.entr(z.softmax(-1)),
    "centre": lambda z: z - z.mean(-1, keepdim=True),
    "standardise": lambda z: (z - z.mean(-1, keepdim=True)) / (1 + z.std(-1, keepdim=True)),
    "stable": lambda z: z - z.detach().amax(-1, keepdim=True),
    "normalise": lambda z: F.normalize(z, dim=-1),
    "layer_norm": lambda z: F.layer_norm(z, (VOCAB,)),
    "cumsum": lambda z: torch.tanh(z).cumsum(-1),
    "sort": lambda z: z.sort(-1)[0],
    "flip": lambda z: z.flip(-1),
    "roll": lambda z: z.roll(2, -1),
    "detach": lambda z: z.detach(),
    "clone": lambda z: z.clone(),
    "nan_to_num": torch.nan_to_num,
    "mask_small": lambda z: z.masked_fill(z < 0.1 * z.amax(-1, keepdim=True), -3.0),
    "pad": lambda z: F.pad(z, (0, 2), value=-4.0)[..., 2:],
    "in_place": lambda z: z.clone().mul_(0.5).add_(0.1),
    "columns_written": lambda z: torch.slice_scatter(z, z[..., 3:8] * 0.5, -1, 3, 8),
    "transposed": lambda z: (z.transpose(-1, -2) * 2.0).transpose(-1, -2),
}

#: wide and what belongs to its rows: target ids, a row scalar, full [.., V] data, a [V] vector
WIDE_WITH: dict[str, Callable] = {
    "bias": lambda z, r: z + r["bias"],
    "vector_mask": lambda z, r: torch.where(r["bias"] > 0, z, -5.0),
    "column": lambda z, r: z * r["column"].unsqueeze(-1),
    "full": lambda z, r: z + r["full"],
    "full_mask": lambda z, r: z.masked_fill(r["full"] > 1.0, -6.0),
    "without_target": lambda z, r: z.scatter(-1, r["ids"].unsqueeze(-1), -8.0),
    "one_hot": lambda z, r: z + F.one_hot(r["ids"], VOCAB).to(torch.float64),
    "against_target": lambda z, r: z - z.gather(-1, r["ids"].unsqueeze(-1)),
}

#: two wide values of the same rows -> wide
PAIR: dict[str, Callable] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: torch.tanh(x) * torch.tanh(y),
    "minimum": torch.minimum,
    "where": lambda x, y: torch.where(x > y, x, 0.5 * y),
    "mix": lambda x, y: torch.logaddexp(x, y),
}

#: wide -> narrow
REDUCE: dict[str, Callable] = {
    "sum": lambda z, r: z.sum(-1),
    "mean": lambda z, r: z.mean(-1),
    "amax": lambda z, r: z.amax(-1),
    "max": lambda z, r: z.max(-1)[0],
    "lse": lambda z, r: z.logsumexp(-1),
    "var": lambda z, r: z.var(-1),
    "norm": lambda z, r: (1 + z.square().sum(-1)).sqrt(),
    "gather": lambda z, r: z.gather(-1, r["ids"].unsqueeze(-1)).squeeze(-1),
    "logprob": lambda z, r: z.log_softmax(-1).gather(-1, r["ids"].unsqueeze(-1)).squeeze(-1),
    "one_hot": lambda z, r: (z * F.one_hot(r["ids"], VOCAB).to(torch.float64)).sum(-1),
    "topk": lambda z, r: z.topk(3, -1)[0].sum(-1),
    "hit": lambda z, r: (z.argmax(-1) == r["ids"]).to(torch.float64),
    "rank": lambda z, r: (z > z.gather(-1, r["ids"].unsqueeze(-1))).to(torch.float64).sum(-1),
    "slice": lambda z, r: z[..., 2:9].logsumexp(-1),
    "columns": lambda z, r: z[..., [3, 1, 5]].log_softmax(-1).select(-1, 1),
    "entropy": lambda z, r: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1),
    "weighted": lambda z, r: (torch.tanh(z) * r["bias"]).sum(-1),
    "column": lambda z, r: z[..., 7],
    "halves": lambda z, r: z.split([6, 7], -1)[0].amax(-1),
}

#: narrow -> narrow; mixing tokens is free here
NARROW: dict[str, Callable] = {
    "same": lambda x: x,
    "tanh": torch.tanh,
    "exp": lambda x: torch.exp(torch.tanh(x)),
    "clamp": lambda x: x.clamp(-1.0, 1.0),
    "detach_times": lambda x: x.detach() * x,
    "cumsum": lambda x: x.cumsum(0),
    "centre": lambda x: x - x.mean(),
    "over_mean": lambda x: x / (2 + torch.tanh(x).mean()),
}

#: ops on a wide [B, T, V] value that mix its tokens
MIXES: dict[str, Callable] = {
    "roll": lambda z: z * z.roll(1, 1),
    "flip": lambda z: z + z.flip(1),
    "flip_batch": lambda z: z * z.flip(0),
    "mean": lambda z: z - z.mean(1, keepdim=True),
    "mean_batch": lambda z: z * z.mean((0, 1)),
    "cumsum": lambda z: z.cumsum(1),
    "softmax": lambda z: z.softmax(1),
    "sort": lambda z: z.sort(1)[0],
    "amax": lambda z: z - z.amax((0, 1, 2)),
    "norm": lambda z: z / (1 + z.norm(dim=0, keepdim=True)),
    "neighbours": lambda z: z[:, 1:] + z[:, :-1],
    # softmaxes, for a product that others follow is a loss head only where a class op reads it
    "gram": lambda z: z @ (z.transpose(1, 2) @ z.softmax(-1)),
    "matmul": lambda z: (torch.ones_like(z[:, :, :1]).transpose(1, 2) * z.mean()) @ z.softmax(-1),
    "pool": lambda z: F.avg_pool1d(z.transpose(1, 2), 2, 1).transpose(1, 2),
    "first": lambda z: z * z[:, :1],
    "cross": lambda z: z + z[:, [1, 0, 2, 3, 4]],
    "merge": lambda z: z.flatten(1).log_softmax(-1).unflatten(1, (5, VOCAB)),
}


def _no_grad(anchor: fx.Proxy, function: Callable[[], Any]) -> Any:
    """``function()`` recorded as Dynamo records a ``no_grad`` block."""
    create = anchor.tracer.create_proxy
    create("call_function", torch._C._set_grad_enabled, (False,), {})
    result = function()
    create("call_function", torch._C._set_grad_enabled, (True,), {})
    return result


class _Branch:
    """One line of computation over one selection of rows."""

    def __init__(self, draw: Draw, args: dict[str, Any], scalar: Any) -> None:
        self.draw = draw
        self.scalar = scalar
        select = SELECTIONS[draw(sorted(SELECTIONS))]
        rows = {name: select(args[name]) for name in ("ids", "column", "full")}
        self.rows = {**rows, "bias": args["bias"]}
        early = draw([True, False])
        hidden = select(args["hidden"]) if early else args["hidden"]
        self.wide = []
        for weight in draw([("weight",), ("weight",), ("weight", "weight2")]):
            z = F.linear(hidden, args[weight])
            self.wide.append(z if early else select(z))
        self.narrow: list[Any] = []

    def grow(self) -> None:
        """One more value."""
        kind = self.draw([*["wide"] * 4, "with", "pair", "reduce", "feedback", "no_grad", "scalar"])
        z = self.draw(self.wide)
        if kind == "wide":
            self.wide.append(WIDE[self.draw(sorted(WIDE))](z))
        elif kind == "with":
            self.wide.append(WIDE_WITH[self.draw(sorted(WIDE_WITH))](z, self.rows))
        elif kind == "pair":
            self.wide.append(PAIR[self.draw(sorted(PAIR))](z, self.draw(self.wide)))
        elif kind == "reduce":
            self.narrow.append(REDUCE[self.draw(sorted(REDUCE))](z, self.rows))
        elif kind == "feedback" and self.narrow:
            row = torch.tanh(self.draw(self.narrow)).unsqueeze(-1)
            self.wide.append(self.draw([z * row, z - row]))
        elif kind == "no_grad":
            name = self.draw(sorted(REDUCE))
            self.narrow.append(_no_grad(z, lambda: REDUCE[name](z, self.rows)))
        elif kind == "scalar" and self.scalar is not None:
            self.wide.append(z / (1.5 + torch.tanh(self.scalar)))

    def finish(self) -> Any:
        """A scalar: every narrow value, after a narrow tail; the last wide value in any case."""
        self.narrow.append(REDUCE[self.draw(sorted(REDUCE))](self.wide[-1], self.rows))
        parts = [NARROW[self.draw(sorted(NARROW))](x).mean() for x in self.narrow]
        total = parts[0]
        for index, part in enumerate(parts[1:]):
            total = total + part * (0.5 + 0.25 * index)
        return total


def draw_loss(draw: Draw, mix: str | None = None) -> fx.GraphModule:
    """A random loss of the inputs; with ``mix``, one whose wide values mix tokens that way."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    args = {name: fx.Proxy(graph.placeholder(name), tracer) for name in ARGUMENTS}
    total: Any = None
    for _ in range(draw([1, 1, 2])):
        branch = _Branch(draw, args, total)
        for _ in range(draw([1, 2, 3, 5, 8])):
            branch.grow()
        part = branch.finish()
        total = part if total is None else total + part
    if mix is not None:
        z = WIDE[draw(["tanh", "softmax", "log_softmax", "scale"])](
            F.linear(args["hidden"], args["weight"])
        )
        total = total + MIXES[mix](z).square().logsumexp(-1).mean()
    graph.output(total.node)
    graph.lint()
    return fx.GraphModule({}, graph)


# ---------------------------------------------------------------- eager, and rewritten
@dataclass(frozen=True)
class Rewritten:
    """A rewritten graph and what the passes said."""

    graph: fx.GraphModule
    report: Report
    shape_env: ShapeEnv


def rewrite(
    gm: fx.GraphModule,
    passes: tuple[str, ...],
    *,
    dynamic: bool,
    tile: int = 4,
    trained: tuple[str, ...] = LEAVES,
) -> Rewritten:
    """Lower ``gm`` on fake inputs of which these are trained, run the passes, build the regions op by op."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    mode.cache_enabled = not dynamic  # as a step captures
    placeholders = inputs_of(gm.graph)
    for node, value in zip(placeholders, make_inputs(trained=trained), strict=True):
        rows = (
            DimDynamic.DUCK if dynamic and node.name not in ("weight", "weight2", "bias") else None
        )
        dims = [rows or DimDynamic.STATIC] * value.dim()
        dims[2:] = [DimDynamic.STATIC] * (value.dim() - 2)
        node.meta["example_value"] = mode.from_tensor(
            value,
            source=ConstantSource(node.name),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims),
        )
    lowered = lower(gm)
    name_sites(lowered, "0")
    config = Config(passes=passes, chunk_tokens=tile or None, min_saved_bytes=0)
    done = pipeline(config).run(lowered, Plan())
    return Rewritten(runnable(done.gm), done.report, env)


def run(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> tuple[torch.Tensor, list[Any]]:
    """Loss and the gradients of the inputs that are trained; None where there is none."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    with torch.enable_grad():
        loss = gm(*leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not loss.requires_grad:
        return loss, [None] * len(wanted)
    return loss.detach(), list(torch.autograd.grad(loss, wanted, allow_unused=True))
