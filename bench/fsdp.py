"""A training step of a model under ``fully_shard`` (FSDP2): eager's, and fxrl's, on the same ranks.

Each layer is a unit, and so is the whole model; layers are checkpointed. Weights are float32, what
is computed is bf16 by FSDP's policy. Every weight is trained; the step is a forward and a backward,
gradients reduced. ``from_fp32``: how far the gradients of the first batch are from those of the
same weights computed in float32, over all weights; what bf16 rounds is in both variants.

    fxrl bench fsdp --ranks 2 --shape qwen3-1.7b --rows 2 --length 4096

Exit code 1: a run failed, or a rewrite was missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fxrl
from bench.lib import child, common, qwen
from fxrl import losses
from fxrl.distributed import joined

COLUMNS = ("variant", "first_s", "step_ms", "peak_gib", "captures", "from_fp32", "error")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see above for what is returned."""
    args = _arguments(argv)
    if args.worker:
        return _work(args)
    note = (
        f"layers of {args.shape}'s shape: {args.layers or 'all'}, random weights, GRPO; on each of "
        f"{args.ranks} ranks {args.rows} sequences of {args.length} tokens"
    )
    memory = "peak_gib: PyTorch's allocator, the first rank's, behind the first step"
    results = common.results(args, "A step under FSDP2", COLUMNS, (note, memory))
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.ranks)]
    words += ["-m", "bench.fsdp", *(sys.argv[1:] if argv is None else argv), "--worker"]
    found = child.measured(words, each=lambda row: results.add(**row))
    if "error" in found:
        results.add(**found)
    results.finish()
    return int(results.failed())


def _work(args: argparse.Namespace) -> int:
    """One rank; the first tells what it has measured."""
    with joined() as ranks:
        device = f"cuda:{torch.cuda.current_device()}" if args.device == "cuda" else "cpu"
        draw = torch.Generator(device).manual_seed(ranks.rank)
        loss_fn = losses.grpo(beta=0.0)
        exact = _sharded(args, device, torch.float32)
        batch = qwen.drawn_batch(exact, args.rows, args.length, draw)
        qwen.backward_fn(partial(loss_fn, exact), batch)()
        wanted = _gradients(exact)
        del exact
        model = _sharded(args, device, torch.bfloat16)
        step = fxrl.optimize(model, loss_fn, fxrl.Config(min_saved_bytes=0, on_miss="error"))
        for variant, run in (("eager", partial(loss_fn, model)), ("fxrl", step)):
            row = _figures(args, model, qwen.backward_fn(run, batch), wanted)
            if ranks.primary:
                child.tell({"variant": variant, "captures": len(step.captures)} | row)
    return 0


def _figures(
    args: argparse.Namespace, model: nn.Module, work: Callable[[], Tensor], wanted: Tensor
) -> dict[str, Any]:
    """Of a step's forward and backward."""
    row: dict[str, Any] = {"first_s": common.wall_s(work, args.device)}
    row["from_fp32"] = ((_gradients(model) - wanted).norm() / wanted.norm()).item()
    common.free_memory(args.device)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def again() -> None:
        work()
        model.zero_grad()

    row["step_ms"] = common.median_ms(again, args.device, repeats=args.repeats)
    if args.device == "cuda":
        row["peak_gib"] = common.gib(torch.cuda.max_memory_allocated())
    return row


def _sharded(args: argparse.Namespace, device: str, dtype: torch.dtype) -> nn.Module:
    model: Any = qwen.make_model(
        args.shape, device, layers=args.layers, dtype=torch.float32, rank=0, input_hook=False
    )
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        fully_shard(part, mp_policy=policy)
    return model  # type: ignore[no-any-return]


def _gradients(model: nn.Module) -> Tensor:
    """Those of all weights in one, whole and in host memory; the model has none then."""
    found = [weight.grad.full_tensor().cpu() for weight in model.parameters()]  # type: ignore[union-attr]
    model.zero_grad()
    return torch.cat([grad.flatten() for grad in found])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=common.positive, default=2)
    parser.add_argument("--shape", default="qwen3-1.7b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--layers", type=common.positive, help="by default the shape's own number")
    parser.add_argument("--rows", type=common.positive, default=2, help="on each rank")
    parser.add_argument("--length", type=common.positive, default=4096, metavar="TOKENS")
    parser.add_argument("--repeats", type=common.positive, default=7)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
