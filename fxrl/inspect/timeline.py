"""A plan's timeline as a picture: what is on the GPU through a step, and what for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from fxrl.errors import PlanError, optional
from fxrl.files import check_writable
from fxrl.ir.plan import Moment, Plan

_GIB = 2**30


def plot(plan: Plan, path: str | Path, title: str) -> Path:
    """Draw the predicted GPU memory of a step, a column per moment, stacked by purpose: the rollout
    if there is one, the forward, the loss head, the backward. The ending of ``path`` chooses the
    format (png, pdf, svg)."""
    if not plan.timeline:
        raise PlanError("the plan predicts no memory, so there is nothing to draw")
    figure = _figure()
    axis = figure.subplots()
    _draw(axis, plan.timeline)
    host = (plan.peak_host_bytes or 0) / _GIB
    axis.set_title(f"{title}\n{plan.step_seconds:.3g} s a step, {host:.1f} GiB on the host")
    axis.set_ylabel("GPU memory [GiB]")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", reverse=True)
    axis.grid(alpha=0.3, axis="y")
    try:
        figure.savefig(str(path), dpi=120)
    except (OSError, ValueError) as error:  # such as an ending that is no format
        raise PlanError(f"{path} cannot be drawn: {error}; choose another file") from error
    return Path(path)


def check_picture(path: str | Path) -> None:
    """Refuses what ``plot`` will not be able to write, before a plan, which takes long."""
    formats = _figure().canvas.get_supported_filetypes()
    ending = Path(path).suffix[1:].lower()
    try:
        if ending and ending not in formats:
            raise ValueError(f"{ending!r} is none of {', '.join(sorted(formats))}")
        check_writable(Path(path).absolute().parent)
    except (OSError, ValueError) as error:
        raise PlanError(f"{path} cannot be drawn: {error}; choose another file") from error


def _figure() -> Any:
    purpose = "drawing a plan"
    figure = optional("matplotlib.figure", purpose).Figure(figsize=(9, 4.5), layout="constrained")
    optional("matplotlib.backends.backend_agg", purpose).FigureCanvasAgg(figure)
    return figure


def _draw(axis: Any, moments: Sequence[Moment]) -> None:
    """The columns, the highest one's words, and which part of a step is where."""
    widths = [len(moments) / 6 if moment.phase == "rollout" else 1.0 for moment in moments]
    starts = [0.0, *accumulate(w + w // 2 if w > 1 else w for w in widths)]
    places = [start + width / 2 for start, width in zip(starts, widths, strict=False)]
    bottom = [0.0] * len(moments)
    parts = dict.fromkeys(part for moment in moments for part in moment.parts)
    for index, part in enumerate(parts):
        heights = [moment.parts.get(part, 0) / _GIB for moment in moments]
        if any(heights):
            axis.bar(places, heights, widths, bottom, label=part, color=f"C{index}", linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = max(range(len(moments)), key=lambda at: moments[at].bytes)
    axis.annotate(
        f"{bottom[top]:.1f} GiB in {moments[top].where}",
        (places[top], bottom[top]),
        (0, 6),
        textcoords="offset points",
        ha=("left", "center", "center", "right")[int(4 * places[top] / starts[-1])],
    )
    axis.set_ylim(0, 1.12 * max(bottom))
    named = [at for at, moment in enumerate(moments) if moment.phase in ("rollout", "head")]
    layers = [at for at, moment in enumerate(moments) if moment.phase in ("forward", "backward")]
    ticks = {at: str(moments[at].layer) for at in layers if moments[at].layer % 6 == 0}
    ticks |= {at: moments[at].phase for at in named}
    axis.set_xticks([places[at] for at in ticks], list(ticks.values()))
    for phase in ("forward", "backward"):
        mine = [at for at, moment in enumerate(moments) if moment.phase == phase]
        if mine:
            middle = (places[mine[0]] + places[mine[-1]]) / 2
            axis.text(
                middle, -0.11, f"{phase}, layer by layer", ha="center", va="top",
                transform=axis.get_xaxis_transform(),
            )  # fmt: skip
