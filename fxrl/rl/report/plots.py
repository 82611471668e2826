"""The reward curve and the steps' times as PNGs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxrl.errors import optional
from fxrl.files import replacing
from fxrl.rl.report.timing import PHASES


def plot_curves(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Of ``metrics.jsonl``: reward, spread and mean, held-out accuracy; below, length and KL."""
    figure = _figure((8, 6))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    steps, reward = _series(records, "reward")
    known = [record for record in records if record.get("reward") is not None]
    spread = [record.get("reward_std") or 0.0 for record in known]
    low = [r - s for r, s in zip(reward, spread, strict=True)]
    high = [r + s for r, s in zip(reward, spread, strict=True)]
    top.fill_between(steps, low, high, alpha=0.15, linewidth=0, label="± std in a group")
    top.plot(steps, reward, linewidth=1, alpha=0.5, color="C0", label="reward")
    window = max(1, len(reward) // 10)
    if window > 1:
        mean = running_mean(reward, window)
        top.plot(steps, mean, color="C0", linewidth=2, label=f"reward, mean of {window} steps")
    _held_out(top, records)
    top.set_ylabel("reward")
    top.set_title(title)
    top.legend(loc="best", fontsize="small")
    bottom.plot(*_series(records, "completions/mean_length"), color="C2")
    bottom.set_ylabel("completion length\n[tokens]", color="C2")
    bottom.set_xlabel("step")
    kl_steps, kl = _series(records, "kl")
    if kl:
        right = bottom.twinx()
        right.plot(kl_steps, kl, color="C3")
        right.set_ylabel("KL to reference [nats]", color="C3")
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    return _saved(figure, path)


def plot_times(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> Path:
    """Of ``metrics.jsonl``: seconds of each step, stacked by phase, with each phase's median."""
    figure = _figure((8, 4))
    axis = figure.subplots()
    known = [record for record in records if record.get("time/generate") is not None]
    steps = [record["step"] for record in known]
    bottom = [0.0] * len(known)
    for index, phase in enumerate(PHASES):
        seconds = [record.get(f"time/{phase}") or 0.0 for record in known]
        label = f"{phase} {statistics.median(seconds or [0.0]):.2f} s"
        axis.bar(steps, seconds, 1.0, bottom, label=label, color=f"C{index}", linewidth=0)
        bottom = [low + high for low, high in zip(bottom, seconds, strict=True)]
    if len(bottom) > 2:  # the first steps compile; they would flatten all others
        axis.set_ylim(0, 1.15 * max(sorted(bottom)[: max(2, len(bottom) * 19 // 20)]))
    axis.set_xlabel("step")
    axis.set_ylabel("seconds")
    axis.set_title(title)
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", reverse=True)
    axis.grid(alpha=0.3, axis="y")
    return _saved(figure, path)


def _figure(size: tuple[float, float]) -> Any:
    purpose = "the reward curve"
    figure = optional("matplotlib.figure", purpose).Figure(figsize=size, layout="constrained")
    optional("matplotlib.backends.backend_agg", purpose).FigureCanvasAgg(figure)
    return figure


def _saved(figure: Any, path: Path) -> Path:
    with replacing(path) as stream:
        figure.savefig(stream, format="png", dpi=120)
    return path


def _held_out(axis: Any, records: Sequence[Mapping[str, Any]]) -> None:
    steps, accuracy = _series(records, "eval/accuracy")
    first = next((r for r in records if r.get("eval/initial_accuracy") is not None), None)
    if first is not None:
        steps, accuracy = [0, *steps], [first["eval/initial_accuracy"], *accuracy]
    if accuracy:
        axis.plot(steps, accuracy, "o-", color="C1", label="held-out accuracy")
    _, baseline = _series(records, "eval/majority_baseline")
    if baseline:
        axis.axhline(baseline[-1], color="grey", linestyle="--", label="most frequent answer")


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last ``window`` values up to each, fewer at the start."""
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def _series(records: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    known = [record for record in records if record.get(key) is not None]
    return [record["step"] for record in known], [record[key] for record in known]
