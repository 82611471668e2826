"""How steps scale over ranks: more sequences (weak), one job shared out (strong), or rollouts.

``weak``: every rank has rows of its own, and gradients are summed while the last backward runs.
``strong``: ``context_parallel`` shares each sequence out. ``rollouts``: whole GRPO steps of ``fxrl
train`` with a vLLM on every rank, ``--rows`` completions a rank. A row is a count of ranks, started
by torchrun; seconds are those of the slowest rank in each step (``rollouts``: of the first rank,
which waits for the others). On a CPU ranks speak gloo.

    fxrl bench scaling weak --ranks 1,2 --shape qwen3-1.7b --rows 32 --length 2048
    fxrl bench scaling strong --ranks 1,2 --shape qwen3-1.7b --rows 1 --length 262144
    fxrl bench scaling rollouts --ranks 1,2 --shape qwen3-1.7b --rows 32 --length 2048

Exit code 1: a run failed, or a rewrite was missed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import fxrl
from bench.lib import child, common, qwen, rl_job
from fxrl import losses
from fxrl.distributed import joined
from fxrl.rl.loop.gradients import GradientSum

COLUMNS = (
    "ranks",
    "step_ms",
    "step_ms_max",
    "generate_ms",
    "train_ms",
    "exposed_ms",
    "peak_gib",
    "planned_gib",
    "efficiency",
    "error",
)
MARK = "scaling: "
WARM_UP = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see above for what is returned."""
    args = _arguments(argv)
    if args.worker:
        return _train(args) if args.what == "rollouts" else _work(args)
    if args.what == "rollouts":
        rl_job.make_model(Path(args.work), args.shape)
        _job(args)
    shared = "one job" if args.what == "strong" else "on each rank"
    notes = [
        f"{args.layers or 'all'} layers of {args.shape}'s shape, LoRA r=32, random weights, GRPO, "
        f"AdamW; {shared}: {args.rows} sequences of {args.length} tokens, "
        f"{args.micro_rows} a backward",
        "exposed_ms: how long the slowest rank waited for gradients behind its backward, last step",
        "efficiency: the first row's time over this one's, times what should be gained",
    ]
    results = common.results(args, f"{args.what} scaling over ranks", COLUMNS, notes)
    first: Mapping[str, Any] | None = None
    for ranks in args.ranks:
        with results.row(ranks=ranks) as row:
            row |= child.measured(_command(ranks, argv), MARK)
            if "error" not in row:
                first = first or dict(row)
                ideal = first["ranks"] / ranks if args.what == "strong" else 1.0
                row["efficiency"] = first["step_ms"] * ideal / row["step_ms"]
    results.finish()
    return int(results.failed())


def _command(ranks: int, argv: Sequence[str] | None) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = sys.argv[1:] if argv is None else argv
    return [sys.executable, *launch, "-m", "bench.scaling", *words, "--worker"]


def _work(args: argparse.Namespace) -> int:
    """One rank; the first one prints what all have measured."""
    gpu = args.device == "cuda"
    with joined() as ranks:
        if ranks.primary:
            logging.basicConfig(format="%(relativeCreated)d ms  %(message)s")
            logging.getLogger("fxrl").setLevel(logging.INFO)
        device = f"cuda:{torch.cuda.current_device()}" if gpu else "cpu"
        sharing = ranks.size if args.what == "strong" else 1
        model = qwen.make_model(args.shape, device, layers=args.layers, checkpointing=False)
        config = fxrl.Config(context_parallel=sharing, min_saved_bytes=0, on_miss="error")
        step = fxrl.optimize(model, losses.grpo(beta=0.0), config)
        weights = list(qwen.trainable(model).values())
        gradients = GradientSum(weights, ranks, early=sharing == 1, sharing=sharing)
        optimizer = torch.optim.AdamW(weights, lr=1e-6)
        draw = torch.Generator(device).manual_seed(0 if sharing > 1 else ranks.rank)

        def update() -> None:
            batch = qwen.drawn_batch(model, args.rows, args.length, draw)
            parts = zip(*(value.split(args.micro_rows) for value in batch.values()), strict=True)
            *earlier, last = (dict(zip(batch, part, strict=True)) for part in parts)
            for part in earlier:
                qwen.backward_fn(step, part)()
            with gradients.early():
                qwen.backward_fn(step, last)()
            if sharing == 1:  # ranks that share a sequence have whole gradients already
                gradients.finish()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        seconds = []
        for _ in range(WARM_UP + args.repeats):
            ranks.exposed_s = 0.0
            ranks.meet()
            seconds.append(max(ranks.gather(common.wall_s(update, args.device))))
            if ranks.primary:
                print(f"step of {ranks.size} ranks: {seconds[-1]:.2f} s", file=sys.stderr)
        peaks = ranks.gather(torch.cuda.max_memory_allocated() if gpu else 0)
        planned = ranks.gather(step.plan.peak_gpu_bytes or 0)
        exposed = max(ranks.gather(ranks.exposed_s))
        if ranks.primary:
            timed = seconds[WARM_UP:]
            found = {"ranks": ranks.size, "exposed_ms": exposed * 1e3}
            found |= {"step_ms": statistics.median(timed) * 1e3, "step_ms_max": max(timed) * 1e3}
            if gpu:
                found["peak_gib"] = common.gib(max(peaks))
                found["planned_gib"] = common.gib(max(planned))
            print(MARK + json.dumps(found), flush=True)
    return 0


def _job(args: argparse.Namespace) -> None:
    """Writes down what every rank trains on: ``fxrl.toml`` and its questions."""
    steps = WARM_UP + args.repeats
    work = Path(args.work)
    rl_job.write_config(work, work / "run", length=args.length, steps=steps, shape=args.shape)


def _train(args: argparse.Namespace) -> int:
    """One rank of ``fxrl train``; the first one prints what it has written down of the steps."""
    from fxrl.rl.train import main as train

    size = int(os.environ.get("WORLD_SIZE", "1"))
    run_dir = Path(args.work) / f"of-{size}"
    prompts = args.rows * size // rl_job.GENERATIONS
    changes = [f"run_dir={run_dir}", f"prompts_per_step={prompts}", *args.override]
    if code := train(str(Path(args.work) / "fxrl.toml"), changes, overwrite=True):
        return code
    if os.environ.get("RANK", "0") == "0":
        steps = rl_job.steps_of(run_dir)[WARM_UP:]
        seconds = [step["step_time"] for step in steps]
        exposed = [step.get("ranks/exposed_s", 0.0) for step in steps]
        found = {"ranks": size, "exposed_ms": exposed[-1] * 1e3, "peak_gib": None}
        found |= {"step_ms": statistics.median(seconds) * 1e3, "step_ms_max": max(seconds) * 1e3}
        for part in ("generate", "train"):
            found[f"{part}_ms"] = statistics.median(s[f"time/{part}"] for s in steps) * 1e3
        print(MARK + json.dumps(found), flush=True)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=("weak", "strong", "rollouts"))
    parser.add_argument("--ranks", type=common.numbers, default=[1, 2], help="counts: 1,2,4")
    parser.add_argument("--shape", default="qwen3-1.7b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--layers", type=common.positive)
    parser.add_argument("--rows", type=common.positive, default=32)
    parser.add_argument(
        "--micro-rows", type=common.positive, default=8, help="rows of a backward (weak, strong)"
    )
    parser.add_argument("--length", type=common.positive, default=2048, metavar="TOKENS")
    parser.add_argument("--repeats", type=common.positive, default=5)
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="of fxrl train's file"
    )
    parser.add_argument("--work", default="/tmp/fxrl-rl-step", help="folder for model and runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
