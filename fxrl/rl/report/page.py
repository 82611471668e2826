"""``run.html``: all that a run's folder knows, as one file that needs no network.

Made from the files alone, so that it can be made of a run that is finished, running or somebody
else's. Nothing in them is trusted: every value is escaped by the template, whatever is not of the
expected kind is left out, and the page's policy lets a browser run its own script and no other.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.metadata
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from fxrl.errors import FxrlError, reason_of
from fxrl.files import write_bytes
from fxrl.ir.remark import Remark, RemarkKind, Report, format_bytes
from fxrl.rl.report.charts import (
    HEIGHT,
    LEFT,
    WIDTH,
    Chart,
    Columns,
    Line,
    Numbers,
    bar_chart,
    in_seconds,
    known,
    line_chart,
    number,
)
from fxrl.rl.report.files import COMPLETIONS, METRICS, each_line, try_to_write
from fxrl.rl.report.timing import PHASES

PAGE, NOTES = "run.html", "run.json"
SAMPLE_BYTES, MOST_SAMPLED = 400_000, 40
"""Sample completions as HTML, and steps of them; others in between are left out."""
MOST_CHARACTERS = 2000
"""Of one value; the files have all of it."""
MOST_REMARKS = 200
JUDGED_BY = ("accuracy", "loss")
"""Of held-out data; also before the first step."""
EVALUATION = {
    "held-out accuracy": [
        Line("accuracy", "eval/accuracy"),
        Line("most frequent answer", "eval/majority_baseline", style="dashed"),
    ],
    "held-out loss": [Line("loss", "eval/loss")],
    "share of groups with equal rewards": [Line("share", "frac_reward_zero_std")],
}
ANSWERS = {
    "reward of given answers, relative to the reference": [
        Line("chosen", "rewards/chosen"),
        Line("rejected", "rewards/rejected", style="dashed"),
    ],
    "chosen over rejected: margin of the rewards": [Line("margin", "rewards/margins")],
    "share of pairs ranked right": [
        Line("trained on", "rewards/accuracies"),
        Line("held out", "eval/rewards/accuracies", style="dashed"),
    ],
    "share of tokens that are the likeliest": [
        Line("trained on", "mean_token_accuracy"),
        Line("held out", "eval/mean_token_accuracy", style="dashed"),
    ],
}
_LENGTH, _RATIO = "completions/{}_length", "sampling/importance_sampling_ratio/{}"
_DRIFT = "sampling/sampling_logp_difference/{}"
POLICY = {
    "KL to the reference [nat a token]": [Line("KL", "kl")],
    "entropy [nat a token]": [Line("entropy", "entropy")],
    "value loss": [Line("loss", "value_loss")],
    "share of the returns' variance that the values explain": [
        Line("explained", "explained_variance")
    ],
    "share of tokens whose value is clipped": [Line("share", "value_clip_ratio")],
    "completion length [tokens], least to most": [
        Line("mean", *map(_LENGTH.format, ("mean", "min", "max")))
    ],
    "share of completions cut at max_tokens": [Line("share", "completions/clipped_ratio")],
    "drift: |log p trainer - log p sampler| [nat], mean": [Line("mean", _DRIFT.format("mean"))],
    "drift of a token, most [nat]": [Line("most", _DRIFT.format("max"))],
    "importance ratio, least to most": [Line("mean", *map(_RATIO.format, ("mean", "min", "max")))],
    "loss": [Line("loss", "loss")],
    "gradient norm, before clipping": [Line("norm", "grad_norm")],
    "learning rate": [Line("rate", "learning_rate")],
}
COST = {
    "completion tokens a second, of the whole step": [Line("tokens/s", "tokens_per_second")],
    "share of padding in micro-batches": [Line("share", "padding/fraction")],
}
"""Pictures of lines: title and lines."""
PACKAGES = ("fxrl", "torch", "transformers", "peft", "vllm", "triton", "numpy")

Table = dict[str, Any]


class NoRunError(FxrlError):
    """The folder holds no run."""


def note(run_dir: Path, tell: Callable[[str], None], **values: Any) -> None:
    """Puts what the other files do not know into ``run.json``, over what it held by these names.
    Where that cannot be written, ``tell`` hears of it."""
    path = run_dir / NOTES
    text = json.dumps(_table(path) | values, indent=1, default=str) + "\n"
    with _telling(tell):
        _write(path, text)


def versions() -> dict[str, str]:
    """Versions of the packages that affect the numbers, as far as installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write_page(run_dir: Path, *, work: str = "writing") -> Path:
    """Write ``run.html`` into a run's folder. Raises ``NoRunError`` if the folder holds no run,
    ``StorageError`` if the page cannot be written."""
    if not run_dir.is_dir():
        raise NoRunError(f"{run_dir} is no folder; give the run_dir of a run")
    columns = Numbers(_with_untrained(_each_line(run_dir / METRICS)))
    notes = _table(run_dir / NOTES)
    if not (columns or notes):
        raise NoRunError(f"{run_dir} holds no {METRICS} with a step in it; give a run's run_dir")
    text = _template().render(_content(run_dir, columns, notes))
    _write(run_dir / PAGE, text, work)
    return run_dir / PAGE


def pages(folder: Path) -> Environment:
    """The templates of a folder: all that they show is escaped, and nothing may be missing."""
    return Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@functools.cache
def _template() -> Template:
    """The page without a run: layout, style, script, and a policy that knows the script's hash."""
    folder = Path(__file__).parent
    environment = pages(folder)
    environment.filters["bytes"] = format_bytes
    style = (folder / "page.css").read_text(encoding="utf-8")
    script = (folder / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals |= {
        "style": Markup(style),
        "script": Markup(script),
        "script_hash": f"sha256-{digest}",
        "width": WIDTH,
        "height": HEIGHT,
        "left": LEFT,
    }
    return environment.get_template("page.html")


def try_to_write_page(run_dir: Path, tell: Callable[[str], None]) -> None:
    """``write_page``; where it cannot be written, ``tell`` hears of it."""
    with _telling(tell):
        write_page(run_dir)


@contextmanager
def _telling(tell: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a page of whatever the files hold is worth no run
        tell(f"{reason_of(error)}; the run goes on without {PAGE}")


def _content(run_dir: Path, columns: Columns, notes: Table) -> dict[str, Any]:
    """The variables of the page's template."""
    config = _table(run_dir / "config.json")
    remarks = _remarks(notes.get("report"))
    return {
        "title": f"{_inner(config, 'model').get('id', 'a run')}: {run_dir.name}",
        "status": _status(columns, config),
        "figures": _figures(columns),
        "groups": _groups(columns, notes),
        "planned": _planned(columns, notes),
        "said": _words(notes.get("outlook")),
        "samples": _samples(run_dir / COMPLETIONS),
        "remarks": remarks[:MOST_REMARKS],
        "left_out": len(remarks) - MOST_REMARKS,
        "config": list(_flat(config)),
        "versions": list(_flat(notes.get("versions", {}))),
    }


def _with_untrained(lines: Iterable[Table]) -> Iterator[Table]:
    """The lines, with the evaluation before the first step as step 0."""
    for at, line in enumerate(lines):
        if at == 0:
            yield {"step": 0} | {f"eval/{n}": line.get(f"eval/initial_{n}") for n in JUDGED_BY}
        yield line


def _status(columns: Columns, config: Table) -> str:
    done, total = int(columns["step"][-1]) if columns else 0, config.get("steps", "?")
    state = "complete" if done == total else "running, stopped or failed"
    return f"{done} of {total} steps, {state}; as of {datetime.now():%Y-%m-%d %H:%M}"


def _figures(columns: Columns) -> list[tuple[str, str]]:
    """The run in a few numbers: name and value."""
    found = []
    rewards = _values(columns, "reward")
    if rewards:
        tenth = max(1, len(rewards) // 10)
        first, last = statistics.fmean(rewards[:tenth]), statistics.fmean(rewards[-tenth:])
        found.append(("reward, first and last steps", f"{first:.3f} → {last:.3f}"))
    for name in JUDGED_BY:
        if values := _values(columns, f"eval/{name}"):
            found.append((f"held-out {name}", f"{values[0]:.3f} → {values[-1]:.3f}"))
    if seconds := _values(columns, "step_time"):
        found.append(("a step, median", in_seconds(statistics.median(seconds))))
        found.append(("all steps", in_seconds(sum(seconds))))
    if tokens := _values(columns, "num_tokens"):
        found.append(("tokens", f"{tokens[-1]:,.0f}"))
    if peaks := _values(columns, "memory/peak_bytes"):
        found.append(("memory, most", format_bytes(max(peaks))))
    return found


def _groups(columns: Columns, notes: Table) -> list[tuple[str, list[Chart]]]:
    """Heading and pictures; what a run did not measure is not there."""
    functions = sorted(key for key in columns if re.fullmatch("rewards/.*/mean", key))
    names = (key.removeprefix("rewards/").removesuffix("/mean") for key in functions)
    by_function = [Line(name, key) for name, key in zip(names, functions, strict=True)]
    reward = {"rewards by function": by_function} if len(functions) > 1 else {}
    seconds = {name: f"time/{name}" for name in PHASES}
    groups = {
        "Reward": [
            _reward_chart(columns),
            *_pictures(EVALUATION | reward | ANSWERS, columns),
        ],
        "Policy": _pictures(POLICY, columns),
        "Time and memory": [
            bar_chart("seconds of a step, by part", columns, seconds),
            _memory_chart(columns, notes),
            *_pictures(COST, columns),
        ],
    }
    return [(name, [c for c in charts if c is not None]) for name, charts in groups.items()]


def _pictures(wanted: Mapping[str, Sequence[Line]], columns: Columns) -> list[Chart | None]:
    return [line_chart(title, columns, lines) for title, lines in wanted.items()]


def _memory_chart(columns: Columns, notes: Table) -> Chart | None:
    """The most that a step took on the GPU, beside what its update was planned to take."""
    steps, peaks = known(columns, "memory/peak_bytes")
    shown = {"step": steps, "used": peaks / 2**30}
    if (planned := number(_inner(notes, "plan"), "peak_gpu_bytes")) is not None:
        shown["plan"] = np.full_like(peaks, planned / 2**30)
    lines = [Line("used", "used"), Line("planned for the update", "plan", style="dashed")]
    return line_chart("memory of a step, most [GiB]", shown, lines)


def _reward_chart(columns: Columns) -> Chart | None:
    """The reward with its spread within groups, and a running mean if there are many steps."""
    if "reward" not in columns:
        return None
    there = ~np.isnan(columns["reward"])
    rewards, spread = columns["reward"][there], np.zeros(there.sum())
    if "reward_std" in columns:
        spread = np.nan_to_num(columns["reward_std"][there])
    window = max(1, len(rewards) // 10)
    means = [rewards[max(0, end - window) : end].mean() for end in range(1, len(rewards) + 1)]
    shown = {"step": columns["step"][there], "reward": rewards, "mean": np.array(means)}
    shown |= {"low": rewards - spread, "high": rewards + spread}
    lines = [Line("reward ± spread in a group", "reward", "low", "high", "c0")]
    if window > 1:
        lines[0] = replace(lines[0], style="thin c0")
        lines.append(Line(f"mean of {window} steps", "mean", style="c0"))
    return line_chart("reward", shown, lines)


def _planned(columns: Columns, notes: Table) -> list[tuple[str, str, str]]:
    """What, as it was planned and as it was measured; memory is the most of any step."""
    plan, memory, rows = _inner(notes, "plan"), _inner(notes, "memory"), []
    for part in PHASES:
        if used := number(memory, part):
            planned = number(plan, "peak_gpu_bytes") if part == "train" else None
            rows.append((f"memory, {part}", _bytes(planned), format_bytes(used)))
    if (planned := number(plan, "peak_host_bytes")) is not None:
        rows.append(("host memory for what layers keep", format_bytes(planned), "-"))
    if (planned := number(plan, "step_seconds")) is not None:
        nothing = np.empty(0)
        keys = "time/train", "padding/micro_batches"
        pairs = zip(*(columns.get(key, nothing) for key in keys), strict=False)
        each = [seconds / count for seconds, count in pairs if seconds > 0 and count > 0]
        measured = in_seconds(statistics.median(each)) if each else "-"
        rows.append(("training on a micro-batch, median", in_seconds(planned), measured))
    return rows


def _samples(path: Path) -> list[tuple[int, list[Table]]]:
    """Steps with their samples: the first, the last, and what there is room for in between.

    The file is read twice, a line at a time: a long run's does not fit into memory.
    """
    steps, every = sorted({line["step"] for line in _each_line(path)}), 1

    def thinned() -> list[int]:
        return sorted({*steps[::every], *steps[-1:]})

    while len(thinned()) > MOST_SAMPLED:
        every *= 2
    found: dict[int, list[Table]] = {step: [] for step in thinned()}
    for line in _each_line(path):
        samples = found.get(line["step"])
        if samples is not None and len(samples) < MOST_SAMPLED:
            samples.append(_sample(line))
    room = {step: len(Markup.escape(str(samples))) for step, samples in found.items()}
    while len(thinned()) > 2 and sum(room[step] for step in thinned()) > SAMPLE_BYTES:
        every *= 2
    return [(step, found[step]) for step in thinned()]


def _sample(line: Table) -> Table:
    rewards = {k.removeprefix("rewards/"): line[k] for k in line if k.startswith("rewards/")}
    shown = {name: _short(number(line, name)) for name in ("reward", "advantage")}
    return {
        **shown,
        "rewards": [(name, _short(number(rewards, name))) for name in rewards],
        "question": _cut(line.get("question", "")),
        "completion": _cut(line.get("completion", "")),
        "turns": [*_turns(line.get("turns"))],
    }


MOST_TURNS = 40
"""Of a completion; ``completions.jsonl`` has all of them."""


def _turns(given: Any) -> Iterator[tuple[str, str]]:
    """Speaker and words of each turn of a completion; tool calls as JSON."""
    turns = given if isinstance(given, list) else []
    for turn in turns[:MOST_TURNS]:
        if isinstance(turn, dict):
            words = [str(turn.get(name) or "") for name in ("reasoning_content", "content")]
            if calls := turn.get("tool_calls"):
                words.append(json.dumps(calls))
            yield _cut(turn.get("role", "")), _cut("\n".join(filter(None, words)))
    if (more := len(turns) - MOST_TURNS) > 0:
        yield "", f"... ({more} more turns)"


def _remarks(given: Any) -> list[Remark]:
    """The rewrite report, those that say the same of many sites as one."""
    found = []
    for one in given if isinstance(given, list) else ():
        if isinstance(one, dict) and one.get("kind") in list(RemarkKind):
            names = ("pass_name", "site", "source", "reason", "cure")
            words = {name: _cut(one.get(name, "")) for name in names}
            saved = int(number(one, "saved_bytes") or 0)
            found.append(Remark(RemarkKind(one["kind"]), **words, saved_bytes=saved))
    return list(Report.of(found).folded())


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """``a.b`` and its value, of each entry of nested tables."""
    if isinstance(value, dict) and value and name.count(".") < 8:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, _cut(value if isinstance(value, str) else json.dumps(value))


def _words(value: Any) -> list[str]:
    return [_cut(line) for line in value] if isinstance(value, list) else []


def _cut(value: Any) -> str:
    text = str(value)
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]}... ({more} more characters)"


def _values(columns: Columns, key: str) -> list[float]:
    return [float(value) for value in known(columns, key)[1]]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _bytes(value: float | None) -> str:
    return "-" if value is None else format_bytes(value)


def _each_line(path: Path) -> Iterator[Table]:
    """``each_line``; none of a link, which a stranger may have put there."""
    return iter(()) if path.is_symlink() else each_line(path)


def _inner(table: Table, key: str) -> Table:
    """What a table has by a name, if it is a table; else an empty one."""
    found = table.get(key)
    return found if isinstance(found, dict) else {}


def _table(path: Path) -> Table:
    """A JSON file's table; empty where there is none, or a link."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() and not path.is_symlink() else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, text: str, work: str = "writing") -> None:
    content = text.encode(errors="backslashreplace")
    try_to_write(lambda: write_bytes(path, content, work=work), str(path))
