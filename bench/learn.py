"""Does it learn: ``fxrl train`` for several seeds, held-out accuracy before and after.

Runs the configuration once per seed (``data.seed`` stays, so all are judged on the same held-out
questions), collects rewards and evaluations from each ``metrics.jsonl``, and draws them beside the
accuracy of always giving the most frequent answer.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.lib import common

COLUMNS = (
    "seed",
    "steps",
    "held_out",
    "majority_baseline",
    "accuracy_before",
    "accuracy_after",
    "rise_points",
    "reward_first_10",
    "reward_last_10",
    "step_s",
    "generate_s",
    "drift_mean",
    "wall_s",
    "error",
)
STOP_GRACE_S = 45
MEDIANS = {
    "step_s": "step_time",
    "generate_s": "time/generate",
    "drift_mean": "sampling/sampling_logp_difference/mean",
}
"""Column: metric of the run whose median over the steps it is."""


def main() -> None:
    args = _arguments()
    config = Path(args.config)
    notes = [
        f"{config}, overrides: {' '.join(args.overrides) or 'none'}; {args.parallel} runs at once",
        "accuracy: held-out questions, none of which is trained on",
    ]
    results = common.results(args, "GRPO learning run", COLUMNS, notes)
    results.extra["config"] = config.read_text()
    curves: dict[str, Any] = {}
    for runs in _batches(args.seeds, args.parallel):
        started = [(seed, _start(args, seed)) for seed in runs]
        begun = time.monotonic()
        deadline = begun + args.time_limit
        for seed, process in started:
            error = _wait(process, deadline)
            row, curve = _collect(_run_dir(args, seed))
            curves[str(seed)] = curve
            results.extra["curves"] = curves
            row |= {"held_out": _held_out(args), "wall_s": time.monotonic() - begun}
            results.add(seed=seed, error=error, **row)
    if args.out:
        _draw(curves, results, Path(args.out).with_suffix(".png"))
    results.finish()


def _batches(seeds: list[int], size: int) -> list[list[int]]:
    return [seeds[at : at + size] for at in range(0, len(seeds), size)]


def _run_dir(args: argparse.Namespace, seed: int) -> Path:
    return Path(args.run_dir) / f"{Path(args.config).stem}_seed{seed}"


def _start(args: argparse.Namespace, seed: int) -> subprocess.Popen[str]:
    """A run whose lines go to its ``log.txt`` and, with the seed before them, to stderr."""
    folder = _run_dir(args, seed)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fxrl", "train", args.config, f"run_dir={folder}"]
    command += [f"seed={seed}", *args.overrides]
    cores = max(1, (os.cpu_count() or 1) // args.parallel)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": str(cores), "PYTHONUNBUFFERED": "1"},
    )
    told = (process.stdout or (), folder / "log.txt", f"seed {seed}: ")
    threading.Thread(target=_copy, args=told).start()
    return process


def _copy(lines: Iterable[str], log: Path, prefix: str) -> None:
    with log.open("w") as file:
        for line in lines:
            file.write(line)
            file.flush()
            sys.stderr.write(prefix + line)


def _wait(process: subprocess.Popen[str], deadline: float) -> str | None:
    """Past the deadline SIGINT: the trainer saves what it has and exits."""
    try:
        code = process.wait(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
        return "stopped at --time-limit"
    return f"exit code {code}, see log.txt" if code else None


def _collect(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row and one curve out of what the run wrote."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []
    rewards = [(line["step"], line["reward"]) for line in lines if line.get("reward") is not None]
    held_out = evaluations(lines)
    values = [reward for _, reward in rewards]
    row: dict[str, Any] = {"steps": len(values)}
    if values:
        row["reward_first_10"] = statistics.fmean(values[:10])
        row["reward_last_10"] = statistics.fmean(values[-10:])
    for column, key in MEDIANS.items():
        found = [line[key] for line in lines if line.get(key) is not None]
        row[column] = statistics.median(found) if found else None
    if held_out:
        before, after = held_out[0], held_out[-1]
        row |= {"accuracy_before": before["accuracy"], "accuracy_after": after["accuracy"]}
        row["rise_points"] = 100 * (after["accuracy"] - before["accuracy"])
        row["majority_baseline"] = before["majority"]
    return row, {"reward": rewards, "held_out": held_out}


def evaluations(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``step, accuracy, majority`` of every evaluation of a run; step 0 is before training."""
    found = []
    for line in lines:
        majority = line.get("eval/majority_baseline")
        if (initial := line.get("eval/initial_accuracy")) is not None:
            found.append({"step": 0, "accuracy": initial, "majority": majority})
        if (accuracy := line.get("eval/accuracy")) is not None:
            found.append({"step": line["step"], "accuracy": accuracy, "majority": majority})
    return found


def _held_out(args: argparse.Namespace) -> int | None:
    """``eval.size`` of the file, unless an override says otherwise."""
    for text in args.overrides:
        if text.startswith("eval.size="):
            return int(text.partition("=")[2])
    size: int | None = tomllib.loads(Path(args.config).read_text()).get("eval", {}).get("size")
    return size


def _draw(curves: dict[str, Any], results: common.Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    baseline = None
    for seed, curve in curves.items():
        if curve["reward"]:
            steps, rewards = zip(*curve["reward"], strict=True)
            left.plot(steps, _smooth(rewards), label=f"seed {seed}")
        points = curve["held_out"]
        if points:
            right.plot(
                [point["step"] for point in points],
                [point["accuracy"] for point in points],
                marker="o",
                label=f"seed {seed}",
            )
            baseline = points[0]["majority"]
    if baseline is not None:
        right.axhline(baseline, linestyle="--", color="gray", label="majority answer")
    left.set(xlabel="step", ylabel="mean reward of the rollouts (10-step mean)")
    right.set(xlabel="step", ylabel="held-out accuracy", ylim=(0, 1))
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        axes.grid(alpha=0.3)
    figure.suptitle(f"{results.title} [{common.machine()}]")
    figure.savefig(path, dpi=110)


def _smooth(values: tuple[float, ...], window: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))]


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("config", help="the TOML file")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--seeds", default=[0, 1, 2], type=common.numbers)
    parser.add_argument("--run-dir", default="runs/learn")
    parser.add_argument("--parallel", type=int, default=3, help="runs at the same time")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds for each group")
    return parser.parse_args()


if __name__ == "__main__":
    main()
