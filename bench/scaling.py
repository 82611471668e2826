"""How steps scale over ranks: more sequences (weak), one job shared out (strong), or rollouts.

``weak``: every rank has rows of its own, and gradients are summed while the last backward runs.
``strong``: ``context_parallel`` shares each sequence out. ``rollouts``: whole GRPO steps of ``fxrl
train`` with a vLLM on every rank, ``--rows`` completions a rank; with ``--stop-tokens`` their
lengths differ. Each count of ranks is started by torchrun, and a row is one of its ranks; a step's
seconds are those of the slowest rank (``rollouts``: of the first, which waits for the others). On a
CPU ranks speak gloo.

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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

import fxrl
from bench.lib import child, common, qwen, rl_job
from fxrl import losses
from fxrl.distributed import joined
from fxrl.rl.loop.gradients import GradientSum
from fxrl.rl.report.page import NOTES

COLUMNS = (
    "ranks",
    "rank",
    "step_ms",
    "step_ms_max",
    "generate_ms",
    "train_ms",
    "tokens_per_s",
    "efficiency",
    "exposed_ms",
    "peak_gib",
    "planned_gib",
    "gpu_gib",
    "length_min",
    "length_mean",
    "length_max",
    "error",
)
WARM_UP = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; see above for what is returned."""
    args = _arguments(argv)
    if args.worker:
        return _train(args) if args.what == "rollouts" else _work(args)
    if args.what == "rollouts":
        rl_job.make_model(Path(args.work), args.shape, args.layers)
        _write_job(args)
    results = common.results(args, f"{args.what} scaling over ranks", COLUMNS, _notes(args))
    alone: float | None = None  # tokens a second of one rank, in the first count that ran
    for ranks in args.ranks:
        for row in _measured(ranks, argv):
            if "error" not in row:
                each = row["tokens_per_s"] / ranks
                alone = alone or each
                row["efficiency"] = each / alone
            results.add(ranks=ranks, **row)
    results.finish()
    return int(results.failed())


def _notes(args: argparse.Namespace) -> Iterable[str]:
    job = f"layers of {args.shape}'s shape: {args.layers or 'all'}, LoRA r={rl_job.RANK}, AdamW, "
    job += "random weights; "
    if args.what == "rollouts":
        end = f", {args.stop_tokens} of the vocabulary's tokens end one" if args.stop_tokens else ""
        yield (
            f"{job}fxrl train with the loss {rl_job.LOSS}; on each rank: {args.rows} completions "
            f"of up to {args.length} tokens{end}, in groups of {rl_job.GENERATIONS}"
        )
        yield "peak_gib: PyTorch's allocator, the most of any rank; gpu_gib: a rank's whole GPU"
        yield "exposed_ms: the wait for gradients behind the backward, the most of any rank"
    else:
        shared = "shared by the ranks" if args.what == "strong" else "on each rank"
        yield (
            f"{job}GRPO; {shared}: {args.rows} sequences of {args.length} tokens, "
            f"{args.micro_rows} a backward"
        )
        yield "peak_gib: PyTorch's allocator, of each rank"
        yield (
            "exposed_ms: how long a rank's GPU ran kernels of NCCL and no others, in one more step "
            "under the profiler, waits for slower ranks included; on a CPU the wait for gradients "
            "behind the backward"
        )
    yield "step_ms: median; efficiency: tokens a second and rank, over the first row's"


def _measured(ranks: int, argv: Sequence[str] | None) -> list[dict[str, Any]]:
    """A row a rank; what only the first has told, the step's figures above all, is everyone's."""
    told: dict[int, dict[str, Any]] = {}
    found = child.measured(_words(ranks, argv), each=lambda t: told.update({t["rank"]: t}))
    if "error" in found:
        return [found]
    return [told[0] | told[rank] for rank in sorted(told)]


def _words(ranks: int, argv: Sequence[str] | None) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    words = sys.argv[1:] if argv is None else argv
    return [*launch, "-m", "bench.scaling", *words, "--worker"]


def _work(args: argparse.Namespace) -> int:
    """One rank; it prints what it has measured."""
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
        tokens = args.rows * args.length * (ranks.size // sharing)
        found = {"rank": ranks.rank, "exposed_ms": ranks.exposed_s * 1e3}
        found |= _step_figures(seconds[WARM_UP:], tokens)
        found |= dict.fromkeys(("length_min", "length_mean", "length_max"), args.length)
        if gpu:
            found["peak_gib"] = common.gib(torch.cuda.max_memory_allocated())
            found["planned_gib"] = common.gib(step.plan.peak_gpu_bytes)
            ranks.meet()
            found["exposed_ms"] = _exposed_ms(update)
        child.tell(found)
    return 0


def _step_figures(seconds: Sequence[float], tokens: float) -> dict[str, Any]:
    """Of steps of so many tokens on all ranks together."""
    middle = statistics.median(seconds)
    return {
        "step_ms": middle * 1e3,
        "step_ms_max": max(seconds) * 1e3,
        "tokens_per_s": tokens / middle,
    }


def _exposed_ms(work: Callable[[], None]) -> float:
    """How long kernels of NCCL ran and none beside them, in one call of ``work``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    of_gpu = [e for e in found.events() or () if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e for e in of_gpu if not e.is_user_annotation and not e.name.startswith("Mem")]
    spans = [(e.time_range.start, e.time_range.end, e.name.startswith("nccl")) for e in kernels]
    return exposed(spans) / 1e3


def exposed(spans: Iterable[tuple[float, float, bool]]) -> float:
    """How long communication runs and nothing else, of kernels' starts, ends and whether each is
    communication; kernels may overlap."""
    moments = sorted(
        moment for start, end, speaks in spans for moment in ((start, speaks, 1), (end, speaks, -1))
    )
    running, since, total = {True: 0, False: 0}, 0.0, 0.0
    for at, speaks, change in moments:
        if running[True] and not running[False]:
            total += at - since
        running[speaks] += change
        since = at
    return total


def _write_job(args: argparse.Namespace) -> None:
    """Writes down what every rank trains on: ``fxrl.toml`` and its questions."""
    work = Path(args.work)
    rl_job.write_config(
        work,
        work / "run",
        length=args.length,
        steps=WARM_UP + args.repeats,
        shape=args.shape,
        layers=args.layers,
    )


def _train(args: argparse.Namespace) -> int:
    """One rank of ``fxrl train``; it prints what its GPU held, the first one also what the run has
    written down of the steps."""
    from fxrl.rl.train import main as train

    size, rank = (int(os.environ.get(name, one)) for name, one in (("WORLD_SIZE", 1), ("RANK", 0)))
    run_dir = Path(args.work) / f"of-{size}"
    prompts = args.rows * size // rl_job.GENERATIONS
    # With random weights any id is drawn about as often as another; the first three are special.
    stops = [*range(3, 3 + args.stop_tokens)]
    changes = [f"run_dir={run_dir}", f"prompts_per_step={prompts}"]
    changes += [f"sampling.stop_token_ids={stops}", *args.override]
    local = int(os.environ.get("LOCAL_RANK", "0"))
    with rl_job.PeakMemory(device=local) as whole:
        if code := train(str(Path(args.work) / "fxrl.toml"), changes, overwrite=True):
            return code
    child.tell({"rank": rank, "gpu_gib": whole.gib} | ({} if rank else _of_run(run_dir)))
    return 0


def _of_run(run_dir: Path) -> dict[str, Any]:
    """A run's steps and plan, of all ranks."""
    steps = rl_job.steps_of(run_dir)[WARM_UP:]
    plan = json.loads((run_dir / NOTES).read_text()).get("plan") or {}
    seconds = [step["step_time"] for step in steps]
    drawn = [step["tokens_per_second"] * step["step_time"] for step in steps]
    found = _step_figures(seconds, 0.0) | {
        "tokens_per_s": sum(drawn) / sum(seconds),
        "exposed_ms": statistics.median(s.get("ranks/exposed_s", 0.0) for s in steps) * 1e3,
        "planned_gib": common.gib(plan.get("peak_gpu_bytes")),
    }
    if "memory/peak_bytes" in steps[0]:
        found["peak_gib"] = common.gib(max(step["memory/peak_bytes"] for step in steps))
    for part in ("generate", "train"):
        found[f"{part}_ms"] = statistics.median(s[f"time/{part}"] for s in steps) * 1e3
    for name, of_steps in (("min", min), ("mean", statistics.fmean), ("max", max)):
        found[f"length_{name}"] = of_steps(s[f"completions/{name}_length"] for s in steps)
    return found


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("what", choices=("weak", "strong", "rollouts"))
    parser.add_argument("--ranks", type=common.numbers, default=[1, 2], help="counts: 1,2,4")
    parser.add_argument("--shape", default="qwen3-1.7b", choices=sorted(qwen.SHAPES))
    parser.add_argument("--layers", type=common.positive, help="by default the shape's own number")
    parser.add_argument("--rows", type=common.positive, default=32)
    parser.add_argument(
        "--micro-rows", type=common.positive, default=8, help="rows of a backward (weak, strong)"
    )
    parser.add_argument("--length", type=common.positive, default=2048, metavar="TOKENS")
    parser.add_argument(
        "--stop-tokens",
        type=int,
        default=0,
        metavar="COUNT",
        help="of the vocabulary, which end a completion (rollouts)",
    )
    parser.add_argument("--repeats", type=common.positive, default=5)
    parser.add_argument(
        "--override", action="append", default=[], metavar="KEY=VALUE", help="of fxrl train's file"
    )
    parser.add_argument("--work", default="/tmp/fxrl-rl-step", help="folder for model and runs")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
