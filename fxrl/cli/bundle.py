"""``fxrl report``: what another person needs to see what fxrl did here, as one file to attach.

    index.html       all of it in short: start here
    setup.json       machine, versions, command, configuration, seed, and the batch's shapes
    measured.json    seconds of a step and its peak, beside what was planned
    plan.json        and memory.svg, which draws it
    verify.json      loss and every gradient against eager
    dump/            remarks, graphs before and after each pass, region bodies, generated code

It holds no weight, no tensor's number and no text of the batch. It does hold paths, the command,
source lines, and graphs, in which the batch's Python numbers (``{"scale": 0.5}``) are constants.

A report is wanted most where something is wrong. So a part that fails becomes its traceback, and
the others are there all the same.
"""

from __future__ import annotations

import base64
import json
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fxrl.errors import ConfigError, FxrlError, MissingPackageError, VerificationError
from fxrl.files import check_writable, replacing
from fxrl.inspect.evaluate import split_result
from fxrl.inspect.timeline import plot
from fxrl.ir.graph import gpu_of
from fxrl.ir.plan import Plan
from fxrl.ir.remark import format_bytes
from fxrl.ir.table import DEFAULT_WIDTH
from fxrl.rl.report.page import pages
from fxrl.step import TrainStep

_STEPS = 4  # the first of which compiles


@dataclass(slots=True)
class Bundle:
    files: dict[str, bytes] = field(default_factory=dict)  # path in the bundle -> content
    # Heading -> text, as the page shows them.
    sections: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)  # part -> traceback
    agrees: bool | None = None  # the step equals eager; None where that is not known

    @property
    def ok(self) -> bool:
        """Every part worked, and the step equals eager."""
        return not self.failures and self.agrees is not False


def check_path(path: str | Path) -> Path:
    """The bundle's path, where a zip file can be written."""
    path = Path(path)
    if path.suffix != ".zip":
        raise ConfigError(f"{path} must end in .zip, which a report is; such as report.zip")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}; make it, or name another")
    try:
        check_writable(path.parent)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; name another") from error
    return path


def write_bundle(
    step: TrainStep,
    batch: Any,
    path: str | Path,
    facts: Mapping[str, Any],
    say: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Runs a step a few times, compares it with eager, and writes what was found to a ``.zip``.

    The step's gradients are put back, and a file at ``path`` is replaced. ``facts`` go into the
    JSON: what the reader must know besides, such as machine and command. ``say`` hears of the
    progress.
    """
    path = check_path(path)
    made = Bundle()
    setup = {**facts, "config": asdict(step.config), "batch": _signature(batch)}
    made.files["setup.json"] = _json(setup)
    parts: dict[str, Callable[[Bundle, TrainStep, Any], None]] = {
        "running the step": _measured,
        "planning": _planned,
        "comparing with eager": _verified,
        "dumping graphs and code": _dumped,
    }
    for name, part in parts.items():
        say(name)
        try:
            part(made, step, batch)
        except Exception:  # whatever it is, it is what the reader looks for
            made.failures[name] = traceback.format_exc()
    made.sections["What fxrl did"] = str(step.report)
    made.files["index.html"] = _page(made, setup).encode()
    say(f"writing {path}")
    try:
        _write(path, made.files)
    except OSError as error:
        raise FxrlError(
            f"{path} could not be written: {error.strerror}; free some space, or name another"
        ) from error
    return made


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    with replacing(path) as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _measured(made: Bundle, step: TrainStep, batch: Any) -> None:
    parameters = [p for p in step.model.parameters() if p.requires_grad]
    before = [p.grad for p in parameters]
    on_gpu = gpu_of(step.model.parameters()) is not None
    seconds: list[float] = []
    try:
        for number in range(_STEPS):
            if on_gpu and number == 1:  # compiling has a peak of its own
                torch.cuda.reset_peak_memory_stats()
            for parameter in parameters:
                parameter.grad = None
            seconds.append(_seconds(step, batch, on_gpu))
    finally:
        for parameter, grad in zip(parameters, before, strict=True):
            parameter.grad = grad
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    plan = step.plan
    made.files["measured.json"] = _json(
        {
            "first_step_seconds": seconds[0],
            "step_seconds": seconds[1:],
            "peak_gpu_bytes": peak,
            "planned": {"step_seconds": plan.step_seconds, "peak_gpu_bytes": plan.peak_gpu_bytes},
        }
    )
    planned = "" if plan.step_seconds is None else f"; planned {plan.step_seconds:.3g} s"
    lines = [f"a step: {min(seconds[1:]):.3g} s{planned}; the first, compiled: {seconds[0]:.3g} s"]
    if peak is not None:
        planned_peak = plan.peak_gpu_bytes
        told = "nothing" if planned_peak is None else format_bytes(planned_peak)
        lines.append(f"GPU memory at its height: {format_bytes(peak)}; planned {told}")
    made.sections["Measured"] = "\n".join(lines)


def _seconds(step: TrainStep, batch: Any, on_gpu: bool) -> float:
    """Seconds of a forward and a backward."""
    started = time.perf_counter()
    loss, _ = split_result(step(batch))
    loss.backward()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _planned(made: Bundle, step: TrainStep, batch: Any) -> None:
    """The plan that ran; where nothing was predicted, the one for the same batch on an H200."""
    plan: Plan = step.plan
    title = "Plan"
    if plan.peak_gpu_bytes is None:
        plan, title = step.plan_for(batch), "Plan, were it an H200"
    made.files["plan.json"] = plan.to_json().encode()
    made.sections[title] = plan.text(DEFAULT_WIDTH)
    if not plan.timeline:
        return
    with tempfile.TemporaryDirectory() as folder:
        try:
            drawn = plot(plan, Path(folder) / "memory.svg", title)
        except MissingPackageError as missing:
            made.sections[title] += f"\nnot drawn: {missing}"
        else:
            made.files["memory.svg"] = drawn.read_bytes()


def _verified(made: Bundle, step: TrainStep, batch: Any) -> None:
    try:
        found = step.verify(batch)
    except VerificationError:
        made.agrees = False
        raise
    made.agrees = found.ok
    made.files["verify.json"] = found.to_json().encode()
    made.sections["Against eager"] = str(found)


def _dumped(made: Bundle, step: TrainStep, _: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = step.dump(folder).parent
        for file in sorted(path for path in root.rglob("*") if path.is_file()):
            made.files[f"dump/{file.relative_to(root).as_posix()}"] = file.read_bytes()


def _signature(batch: Any) -> dict[str, str]:
    """Each leaf of a batch: dtype and shape of a tensor, the type of anything else."""
    leaves, _ = pytree.tree_flatten_with_path(batch)
    return {pytree.keystr(place): _kind(leaf) for place, leaf in leaves}


def _kind(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    return f"{leaf.dtype} {list(leaf.shape)} on {leaf.device}"


def _page(made: Bundle, setup: Mapping[str, Any]) -> str:
    drawing = made.files.get("memory.svg")
    template = pages(Path(__file__).parent).get_template("bundle.html")
    return template.render(
        made=made,
        setup={name: json.dumps(value, indent=1, default=str) for name, value in setup.items()},
        drawing=None if drawing is None else base64.b64encode(drawing).decode(),
    )


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1, default=str) + "\n").encode()
