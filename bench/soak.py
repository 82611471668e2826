"""A long run in small: do memory, file handles or threads of ``fxrl train`` grow with its steps?

One process trains a tiny model for thousands of steps in which everything happens that happens in a
long run: standby and wake, groups drawn again, evaluations, checkpoints, the page, metrics in
TensorBoard, several updates a step with scoring under policy and reference, compiled regions.
Exit code 1: resident memory grew by more than ``--tolerance`` percent after the warm-up, or there
are more handles or threads than at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.lib import common
from fxrl.passes import REGISTRY
from fxrl.rl import Callback, Trainer
from fxrl.rl.callbacks import Control
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.types import TrainerState

COLUMNS = (
    "step",
    "resident_mib",
    "gpu_mib",
    "handles",
    "threads",
    "refills",
    "seconds_a_step",
    "error",
)
MiB = 2**20
NUM_ROWS = 20
WARM_UP = 4  # of NUM_ROWS


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    notes = [
        "each step: rollouts with refills, standby, scoring under policy and reference, two "
        "updates, TensorBoard; every 5th a checkpoint and run.html, every 10th an evaluation",
        f"resident_mib after a garbage collection; the first {WARM_UP} rows are warm-up",
    ]
    results = common.results(args, "Soak", COLUMNS, notes)
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        results.add(**row)

    with (
        tempfile.TemporaryDirectory(prefix="fxrl-soak-") as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        soak(Path(folder) / "run", args.steps, args.device, add)
    grown = growth(rows)
    results.extra["growth"] = grown
    told = ", ".join(f"{name} {value:+.3g}" for name, value in grown.items())
    results.note(f"from the end of the warm-up to the highest value after it: {told}")
    results.finish()
    return int(grown["resident %"] > args.tolerance or grown["handles"] > 0 or grown["threads"] > 0)


def odd(completions: Sequence[str], completion_ids: Sequence[Any], **columns: Any) -> list[float]:
    """A reward that is the same for a whole group now and then, which is then drawn again."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def soak(
    run_dir: Path, steps: int, device: str, add: Callable[[dict[str, Any]], None], **changes: Any
) -> None:
    """Runs ``steps`` steps; ``add`` gets ``NUM_ROWS`` rows of ``COLUMNS``.

    Args:
        changes: other values of the configuration.
    """
    config = {
        "run_dir": str(run_dir),
        "steps": steps,
        "save_every": 5,
        "prompts_per_step": 2,
        "micro_batch_tokens": 128,
        "num_iterations": 2,
        "dynamic_sampling": "refill",
        "model": {"device": device, "lora": {"r": 4}},
        "loss": {"name": "grpo", "beta": 0.05},
        "sampling": {"num_generations": 4, "max_tokens": 8},
        "optim": {"lr": 1e-3},
        "eval": {"size": 4, "every": 10},
        # Named passes are asked for, so a model as small as this one has compiled layers too.
        "fxrl": {"min_saved_bytes": 0, "passes": tuple(REGISTRY)},
    }
    model = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1"
    questions = [{"prompt": f"count to {'1' * (i % 7)}{i}", "answer": f"{i}"} for i in range(24)]
    watch = Watch(max(1, steps // NUM_ROWS), device, add)
    Trainer(model, odd, questions, config | changes, callbacks=[watch]).train()


class Watch(Callback):
    """Looks at the process every so many steps."""

    def __init__(self, every: int, device: str, add: Callable[[dict[str, Any]], None]) -> None:
        self._every, self._device, self._add = every, device, add
        self._refills = self._seconds = 0.0

    def on_log(
        self, config: TrainConfig, state: TrainerState, control: Control, **kwargs: Any
    ) -> None:
        logs: Mapping[str, Any] = kwargs["logs"]
        if "step" not in logs:  # the evaluation before the first step
            return
        self._refills += logs["dynamic_sampling/num_refills"]
        self._seconds += logs["step_time"]
        if state.global_step % self._every == 0:
            gc.collect()
            on_gpu = torch.cuda.memory_allocated() / MiB if self._device == "cuda" else None
            row = {"step": state.global_step, "gpu_mib": on_gpu, "refills": self._refills}
            self._add(row | process() | {"seconds_a_step": self._seconds / self._every})
            self._refills = self._seconds = 0.0


def process() -> dict[str, Any]:
    """What this process holds of the system."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") / MiB,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def growth(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """How far the rows after the warm-up rise above its last one; memory in percent."""
    base, later = rows[WARM_UP - 1], rows[WARM_UP:]
    rise = {
        name: max(row[name] for row in later) - base[name]
        for name in ("resident_mib", "handles", "threads")
    }
    percent = 100 * rise.pop("resident_mib") / base["resident_mib"]
    return {"resident %": percent, **rise}


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--tolerance", type=float, default=2.0, help="percent of resident memory")
    args = parser.parse_args(arguments)
    if args.steps < NUM_ROWS:
        parser.error(f"--steps={args.steps}: at least {NUM_ROWS}")
    return args


if __name__ == "__main__":
    sys.exit(main())
