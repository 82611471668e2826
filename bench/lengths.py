"""Steps of varying lengths in 0.95 of a small card: does memory run out, does it grow?

Six layers of Qwen3-8B's shape under LoRA, bf16, AdamW; each step's length is drawn anew, from
``--shortest`` to ``--longest`` tokens. Of the GPU only ``--card`` GiB may be allocated, so memory
runs out as on a card of that size; ``Config.gpu_memory`` is ``--share`` of it. A row is a block of
steps; ``reserved_mib_by_step`` in the result file has every step.

    fxrl bench lengths
    fxrl bench lengths --card 10 --longest 16384 --steps 400

Exit code 1: memory ran out in a step (also where fxrl made room and went on), a step failed, or
more was reserved after the warm-up than in it. The longest length is among the warm-up's.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import fxrl
from bench.lib import common, qwen
from fxrl import losses
from fxrl.ops import host_memory
from fxrl.ops.out_of_memory import MemoryWarning

COLUMNS = (
    "steps",
    "tokens_min",
    "tokens_max",
    "step_ms",
    "step_ms_max",
    "peak_gib",
    "predicted_gib",
    "reserved_gib",
    "host_gib",
    "retries",
    "shortages",
    "error",
)
WARM_UP = 20
BLOCK = 10
MiB = 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see above for what is returned."""
    args = _arguments(argv)
    notes = [
        f"{args.layers} layers of {args.shape}'s shape, LoRA r=32, bf16, random weights, GRPO, "
        f"AdamW; one sequence of {args.shortest} to {args.longest} tokens, drawn each step; the "
        f"longest is among the first {WARM_UP}",
        f"card: {args.card or 'all'} GiB; gpu_memory: {args.share} of it; host_memory: free; "
        f"PYTORCH_CUDA_ALLOC_CONF={os.environ.get('PYTORCH_CUDA_ALLOC_CONF', '')!r}",
        "reserved_gib: PyTorch's allocator, the block's highest; retries: how often it gave back "
        "all it cached and asked anew; shortages: how often memory ran out and fxrl made room",
    ]
    results = common.results(args, "Lengths that vary in a bounded budget", COLUMNS, notes)
    reserved: list[float] = []
    with results.row(steps="in all") as whole:
        for block in blocks(steps(args), args.steps):
            reserved += block.pop("reserved_mib")
            results.extra["reserved_mib_by_step"] = reserved
            results.add(**block)
        whole |= {"shortages": sum(_column(results, "shortages"))}
        whole |= {"retries": sum(_column(results, "retries"))}
    grown = growth(reserved)
    results.extra["grown_mib"] = grown
    results.note(f"most reserved after step {WARM_UP} beside most until then: {grown:+.0f} MiB")
    results.finish()
    return int(results.failed() or grown > 0 or any(_column(results, "shortages")))


def _column(results: common.Results, name: str) -> list[int]:
    at = results.columns.index(name)
    return [row[at] for row in results.rows if row[at] is not None]


def growth(reserved_mib: Sequence[float]) -> float:
    """How far what is reserved after the warm-up rises above its highest in it; 0 if it does not,
    or nothing comes after it."""
    first, later = reserved_mib[:WARM_UP], reserved_mib[WARM_UP:]
    return max(0.0, max(later, default=0.0) - max(first, default=0.0))


def lengths(count: int, shortest: int, longest: int, seed: int = 0) -> list[int]:
    """Tokens of each step; one in the warm-up is as long as any can be."""
    draw = random.Random(seed)
    drawn = [draw.randint(shortest, longest) for _ in range(count)]
    drawn[draw.randrange(min(count, WARM_UP))] = longest
    return drawn


def steps(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Runs them; of each its tokens, milliseconds and memory."""
    gpu = args.device == "cuda"
    bound: dict[str, Any] = {}
    if gpu:
        card = args.card or torch.cuda.get_device_properties(0).total_memory / common.GiB
        common.limit_memory(card)
        bound["gpu_memory"] = f"{args.share * card:.3f}GiB"
    model = qwen.make_model(
        args.shape, args.device, layers=args.layers, rank=32, checkpointing=False
    )
    step = fxrl.optimize(
        model, losses.grpo(beta=0.0), fxrl.Config(min_saved_bytes=0, on_miss="error", **bound)
    )
    optimizer = torch.optim.AdamW(list(qwen.trainable(model).values()), lr=1e-6)
    draw = torch.Generator(args.device).manual_seed(0)

    def update(batch: Mapping[str, torch.Tensor]) -> None:
        qwen.backward_fn(step, dict(batch))()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for tokens in lengths(args.steps, args.shortest, args.longest):
        batch = qwen.drawn_batch(model, 1, tokens, draw)
        yield (
            {"tokens": tokens}
            | _watched(lambda given=batch: update(given), args.device)
            | {"predicted_gib": common.gib(step.plan.peak_gpu_bytes)}
        )


def _watched(work: Callable[[], None], device: str) -> dict[str, Any]:
    """One step's milliseconds, memory and shortages."""
    gpu = device == "cuda"
    before = torch.cuda.memory_stats()["num_alloc_retries"] if gpu else 0
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", MemoryWarning)
        took = common.wall_s(work, device)
    return {
        "ms": took * 1e3,
        "peak_gib": common.gib(torch.cuda.max_memory_allocated()) if gpu else None,
        "reserved_mib": torch.cuda.max_memory_reserved() / MiB if gpu else 0.0,
        "host_gib": common.gib(host_memory.bytes_held()),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"] - before if gpu else 0,
        "shortages": sum(issubclass(one.category, MemoryWarning) for one in said),
    }


def blocks(of_steps: Iterator[dict[str, Any]], count: int) -> Iterator[dict[str, Any]]:
    """A row for every so many steps, the last one shorter; ``reserved_mib`` of each of them."""
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        found = [next(of_steps) for _ in range(first, last)]
        yield {
            "steps": f"{first + 1}-{last}",
            "tokens_min": min(one["tokens"] for one in found),
            "tokens_max": max(one["tokens"] for one in found),
            "step_ms": sorted(one["ms"] for one in found)[len(found) // 2],
            "step_ms_max": max(one["ms"] for one in found),
            "peak_gib": _most(found, "peak_gib"),
            "predicted_gib": _most(found, "predicted_gib"),
            "reserved_gib": max(one["reserved_mib"] for one in found) * MiB / common.GiB,
            "host_gib": found[-1]["host_gib"],
            "retries": sum(one["retries"] for one in found),
            "shortages": sum(one["shortages"] for one in found),
            "reserved_mib": [one["reserved_mib"] for one in found],
        }


def _most(found: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((one[name] for one in found if one[name] is not None), default=None)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", default="qwen3-8b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--layers", type=common.positive, default=6)
    parser.add_argument("--steps", type=common.positive, default=200)
    parser.add_argument("--shortest", type=common.positive, default=1024, metavar="TOKENS")
    parser.add_argument("--longest", type=common.positive, default=12288, metavar="TOKENS")
    parser.add_argument("--card", type=float, default=8.0, metavar="GIB", help="0: the whole GPU")
    parser.add_argument("--share", type=float, default=0.95, help="of the card, for fxrl")
    args = parser.parse_args(argv)
    if not 3 <= args.shortest <= args.longest:
        parser.error(f"--shortest {args.shortest} is not from 3 to --longest {args.longest}")
    return args


if __name__ == "__main__":
    sys.exit(main())
