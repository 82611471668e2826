"""Does it learn: ``fxrl train`` for several seeds, a held-out measure before and after.

Runs the configuration once per seed (``data.seed`` stays, so all are judged on the same held-out
questions), collects training metrics and evaluations from each ``metrics.jsonl``, and draws them.
Instead of a file, ``sft``, ``dpo``, ``grpo`` and ``tools`` name the tasks of bench/lib/sums.py,
each with an amount that the measure has to gain; a file's runs are judged by accuracy, beside that
of always giving the most frequent answer. A loss gains by falling.

``--against "fp8: fxrl.precision=fp8"`` trains every seed a second time with these overrides on top,
on the same data, and says whether the mean curves are within the noise between the seeds of the
first: ``within_noise``. Given several times, each is held against the first. The name may go.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.lib import common, sums

COLUMNS = (
    "variant",
    "seed",
    "steps",
    "held_out",
    "measure",
    "majority_baseline",
    "before",
    "after",
    "gain",
    "gain_asked",
    "curve",
    "first_10",
    "last_10",
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


AS_GIVEN = "as given"
LAST = 50
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t, what 97.5 % lie below, from one degree of freedom on; more take the last."""


@dataclass(frozen=True)
class Run:
    """A variant, the overrides that make it, and a seed."""

    variant: str
    overrides: tuple[str, ...]
    seed: int
    folder: Path


def main() -> int:
    """Measures; 1 if a run failed, or gained less than its task asks."""
    args = _arguments()
    task = sums.TASKS.get(args.config)
    if task is not None:
        args.config = str(sums.write(args.config, Path(args.run_dir) / args.config, args.model))
    config = Path(args.config)
    notes = [
        f"{config.name}, overrides: {' '.join(args.overrides) or 'none'}; {args.parallel} runs at "
        "once",
        "measure: of held-out questions, none of which is trained on; curve: of the rollouts or "
        "examples that are",
    ]
    results = common.results(args, f"Learning runs of {config.name}", COLUMNS, notes)
    results.extra |= {"config": config.read_text(), "curves": {}}
    curves: dict[Run, dict[str, Any]] = {}
    for group in _batches(_runs(args), args.parallel):
        started = [(run, _start(args, run)) for run in group]
        begun = time.monotonic()
        deadline = begun + args.time_limit
        for run, process in started:
            error = _wait(process, deadline)
            row, curve = collect(run.folder, task)
            curves[run] = curve
            results.extra["curves"].setdefault(run.variant, {})[str(run.seed)] = curve
            row |= {"held_out": _held_out(args), "wall_s": time.monotonic() - begun}
            row |= {"error": error} if error else {}
            results.add(variant=run.variant if args.against else None, seed=run.seed, **row)
    if args.against:
        results.extra["comparisons"] = found = compared(results.extra["curves"])
        for name, words in map(_named, args.against):
            results.note(f"{name}: {' '.join(words)}")
        for told in map(_told, found) if found else ("nothing to compare: a run made no step",):
            results.note(told)
    if args.out:
        _draw(curves, results, Path(args.out).with_suffix(".png"))
    results.finish()
    return int(results.failed())


def _runs(args: argparse.Namespace) -> list[Run]:
    stem = Path(args.config).stem
    return [
        Run(name, words, seed, Path(args.run_dir) / f"{stem}{f'_{i}' if i else ''}_seed{seed}")
        for i, (name, words) in enumerate(((AS_GIVEN, ()), *map(_named, args.against)))
        for seed in args.seeds
    ]


def _named(text: str) -> tuple[str, tuple[str, ...]]:
    """``"fp8: a=1 b=2"`` as its name, by default the text, and its overrides."""
    words = tuple(shlex.split(text))
    return (words[0][:-1], words[1:]) if words and words[0].endswith(":") else (text, words)


def _batches(runs: list[Run], size: int) -> list[list[Run]]:
    return [runs[at : at + size] for at in range(0, len(runs), size)]


def _start(args: argparse.Namespace, run: Run) -> subprocess.Popen[str]:
    """A run whose lines go to its ``log.txt`` and, with its folder before them, to stderr."""
    run.folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "fxrl", "train", args.config, f"run_dir={run.folder}"]
    command += [f"seed={run.seed}", *args.overrides, *run.overrides]
    cores = max(1, (os.cpu_count() or 1) // args.parallel)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": str(cores), "PYTHONUNBUFFERED": "1"},
    )
    told = (process.stdout or (), run.folder / "log.txt", f"{run.folder.name}: ")
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


def collect(folder: Path, task: sums.Task | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row and one curve out of what the run wrote."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []
    trained = {
        name: [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        for name in ("reward", "loss")
    }
    name = "reward" if trained["reward"] else "loss"
    measure = task.measure if task else "accuracy"
    held_out = evaluations(lines, measure, task.before if task else None)
    row: dict[str, Any] = {"steps": len(trained[name]), "measure": measure, "curve": name}
    if values := [value for _, value in trained[name]]:
        row["first_10"] = statistics.fmean(values[:10])
        row["last_10"] = statistics.fmean(values[-10:])
    for column, key in MEDIANS.items():
        found = [line[key] for line in lines if line.get(key) is not None]
        row[column] = statistics.median(found) if found else None
    if held_out:
        before, after = held_out[0]["value"], held_out[-1]["value"]
        row |= {"before": before, "after": after}
        row["gain"] = before - after if measure == "loss" else after - before
        row["majority_baseline"] = held_out[0]["majority"]
    if task is not None:
        row["gain_asked"] = task.gain
        if row.get("gain", -math.inf) < task.gain:
            row["error"] = f"gained less than {task.gain:g}"
    return row, {name: trained[name], **trained, "held_out": held_out}


def compared(curves: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each further variant against the first: its mean over the seeds, and the first's noise.

    Args:
        curves: variant -> seed -> what ``collect`` gives.

    Returns:
        For reward and loss, over the last ``LAST`` steps that all runs made and over all of these,
        what ``within_noise`` gives, with ``variant``, ``curve`` and ``steps``. Empty if a run has
        made no step.
    """
    first, *others = curves
    found = []
    for name in ("reward", "loss"):
        seeds = {
            variant: [[value for _, value in curve[name]] for curve in by_seed.values()]
            for variant, by_seed in curves.items()
        }
        made = min(len(values) for lists in seeds.values() for values in lists)
        for steps in sorted({made, min(LAST, made)} - {0}):
            means = {
                variant: [statistics.fmean(values[made - steps : made]) for values in lists]
                for variant, lists in seeds.items()
            }
            for other in others:
                told = {"variant": other, "curve": name, "steps": [made - steps + 1, made]}
                found.append(told | within_noise(means[first], means[other]))
    return found


def within_noise(given: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    """Whether the mean of other runs lies where that of as many further seeds of the given runs
    would, in 19 of 20 cases.

    That is ``mean +- t s sqrt(1 / n + 1 / m)`` of n given and m other runs, with s the standard
    deviation between the given ones and t Student's for n - 1 degrees of freedom.

    Args:
        given: one number for each seed, two at least.
        other: likewise, one at least.

    Returns:
        Both means, ``noise`` (what stands behind +-) and ``within``.
    """
    mean, theirs = statistics.fmean(given), statistics.fmean(other)
    t = _T_975[min(len(given) - 1, len(_T_975)) - 1]
    noise = t * statistics.stdev(given) * math.sqrt(1 / len(given) + 1 / len(other))
    within = abs(theirs - mean) <= noise
    return {"given_mean": mean, "mean": theirs, "noise": noise, "within": within}


def _told(one: dict[str, Any]) -> str:
    start, end = one["steps"]
    verdict = "within" if one["within"] else "outside"
    return (
        f"{one['variant']}: mean {one['curve']} of steps {start} to {end} is {one['mean']:.4g}, "
        f"{verdict} the noise between seeds of the runs {AS_GIVEN}, {one['given_mean']:.4g} +- "
        f"{one['noise']:.2g} (95 %, Student's t)"
    )


def evaluations(
    lines: list[dict[str, Any]], measure: str = "accuracy", before: float | None = None
) -> list[dict[str, Any]]:
    """``step, value, majority`` of every evaluation of a run; step 0 is before training.

    Args:
        lines: of metrics.jsonl.
        measure: metric of the evaluations.
        before: its value at step 0, where the lines do not say it.
    """
    found = []
    for line in lines:
        majority = line.get("eval/majority_baseline")
        initial = line.get(f"eval/initial_{measure}", before if line["step"] == 1 else None)
        if initial is not None:
            found.append({"step": 0, "value": initial, "majority": majority})
        if (value := line.get(f"eval/{measure}")) is not None:
            found.append({"step": line["step"], "value": value, "majority": majority})
    return found


def _held_out(args: argparse.Namespace) -> int | None:
    """``eval.size`` of the file, unless an override says otherwise."""
    for text in args.overrides:
        if text.startswith("eval.size="):
            return int(text.partition("=")[2])
    size: int | None = tomllib.loads(Path(args.config).read_text()).get("eval", {}).get("size")
    return size


def _draw(curves: dict[Run, dict[str, Any]], results: common.Results, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    variants = list(dict.fromkeys(run.variant for run in curves))
    name, baseline = "", None
    lines: dict[str, Any] = {}
    for place, (run, curve) in enumerate(curves.items()):
        name = next(iter(curve))
        colour = f"C{variants.index(run.variant) if variants[1:] else place}"
        label = f"{run.variant}, each seed" if variants[1:] else f"seed {run.seed}"
        if curve[name]:
            steps, values = zip(*curve[name], strict=True)
            (lines[label],) = left.plot(steps, _smooth(values), colour)
        points = curve["held_out"]
        if points:
            at, values = zip(*((point["step"], point["value"]) for point in points), strict=True)
            (lines[label],) = right.plot(at, values, colour, marker="o")
            baseline = points[0]["majority"]
    if baseline is not None:
        lines["majority answer"] = right.axhline(baseline, linestyle="--", color="gray")
    measure = str(results.rows[0][COLUMNS.index("measure")])
    left.set(xlabel="step", ylabel=f"{name} of what is trained on (10-step mean)")
    right.set(
        xlabel="step", ylabel=f"held-out {measure}", ylim=(0, None if measure == "loss" else 1)
    )
    for axes in (left, right):
        axes.grid(alpha=0.3)
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center")
    figure.suptitle(f"{results.title} [{common.machine()}]")
    figure.savefig(path, dpi=110)


def _smooth(values: tuple[float, ...], window: int = 10) -> list[float]:
    return [statistics.fmean(values[max(0, at + 1 - window) : at + 1]) for at in range(len(values))]


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("config", help=f"a TOML file, or one of {', '.join(sums.TASKS)}")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="of a named task")
    parser.add_argument("--seeds", default=[0, 1, 2], type=common.numbers)
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="'NAME: KEY=VALUE ...'",
        help="overrides of further runs of each seed, to be compared",
    )
    parser.add_argument("--run-dir", default="runs/learn")
    parser.add_argument("--parallel", type=int, default=3, help="runs at the same time")
    parser.add_argument("--time-limit", type=float, default=540, help="seconds for each group")
    args = parser.parse_intermixed_args()
    if args.against and len(args.seeds) < 2:
        parser.error("--against compares with the noise between seeds, of which it takes two")
    names = [AS_GIVEN, *(_named(text)[0] for text in args.against)]
    if len({*names}) < len(names):
        parser.error("--against takes overrides under a name of their own each time")
    former = [run.folder for run in _runs(args) if run.folder.exists()]
    if former:  # what they wrote would be read as this run's
        there = ", ".join(map(str, former))
        parser.error(f"there are runs already: {there}; remove them, or give another --run-dir")
    return args


if __name__ == "__main__":
    sys.exit(main())
