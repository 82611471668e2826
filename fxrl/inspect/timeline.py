"""A plan's timeline as a picture: what is on the GPU through a step, and what for."""

from __future__ import annotations

from pathlib import Path

from fxrl.errors import PlanError, optional
from fxrl.ir.plan import Plan

_GIB = 2**30


def plot(plan: Plan, path: str | Path, title: str) -> Path:
    """Draw predicted GPU memory over a step: one column a moment, forward to the left of the loss
    head and backward to the right, stacked by what it is for.

    Args:
        path: its ending says the format (png, pdf, svg).

    Raises:
        PlanError: the plan predicts nothing.
    """
    if not plan.timeline:
        raise PlanError("the plan predicts no memory, so there is nothing to draw")
    purpose = "drawing a plan"
    figure = optional("matplotlib.figure", purpose).Figure(figsize=(9, 4.5), layout="constrained")
    optional("matplotlib.backends.backend_agg", purpose).FigureCanvasAgg(figure)
    axis = figure.subplots()
    moments = plan.timeline
    places = list(range(len(moments)))
    bottom = [0.0] * len(moments)
    for index, part in enumerate(moments[0].parts):
        heights = [moment.parts[part] / _GIB for moment in moments]
        if any(heights):
            axis.bar(places, heights, 1.0, bottom, label=part, color=f"C{index}", linewidth=0)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    top = max(places, key=lambda place: moments[place].bytes)
    axis.annotate(
        f"{bottom[top]:.1f} GiB in {moments[top].where}",
        (top, bottom[top]),
        (0, 6),
        textcoords="offset points",
        ha=("left", "center", "center", "right")[4 * top // len(places)],
    )
    head = next((p for p in places if moments[p].phase == "head"), 0)
    shown = [p for p in places if moments[p].layer % 6 == 0 or p == head]
    axis.set_xticks(shown, ["head" if p == head else str(moments[p].layer) for p in shown])
    axis.set_xlabel("forward, layer by layer        the loss head        backward, layer by layer")
    axis.set_ylabel("GPU memory [GiB]")
    axis.set_ylim(0, 1.12 * max(bottom))
    host = (plan.peak_host_bytes or 0) / _GIB
    axis.set_title(f"{title}\n{plan.step_seconds:.3g} s a step, {host:.1f} GiB on the host")
    axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", reverse=True)
    axis.grid(alpha=0.3, axis="y")
    figure.savefig(str(path), dpi=120)
    return Path(path)
