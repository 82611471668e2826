"""What the commands print: tables for people, one JSON document (or JSON lines) for tools.

stdout carries the answer, stderr everything else, so that pipes stay clean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from fxrl.doctor import Check, Diagnosis
from fxrl.ir.remark import Report, format_bytes
from fxrl.ir.table import cell, folded, open_table, plain_text
from fxrl.rl.errors import in_words
from fxrl.rl.report.progress import PatientReporter, Say, broken, reporter_on, told, warned

if TYPE_CHECKING:
    from fxrl.compile.whatif import Advice, Fit
    from fxrl.engines.kv_cache import RolloutMemory
    from fxrl.ir.plan import Plan

_WIDTH = 80
_STYLES = {"ok": "green", "missing": "yellow", "wrong version": "yellow", "broken": "bold red"}


def as_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, default=str))


@contextmanager
def working(words: str) -> Iterator[Say]:
    """Show on stderr, while the block lasts, what is being done and for how long, including what
    the compiler logs and fxrl warns of; the block itself must not print."""
    with (
        reporter_on(Console(stderr=True), json=False, log=PatientReporter) as reporter,
        reporter.stage(words) as say,
        told("fxrl", say),
        warned(reporter.message),
    ):
        yield say


def status(message: str) -> None:
    """One grey line on stderr: what is going on."""
    Console(stderr=True, highlight=False).print(f"[dim]{escape(message)}[/]", soft_wrap=True)


def error(problem: Exception, *, as_json: bool) -> None:
    """One red line on stderr, on a terminal broken between words; with ``--json`` also an object
    on stdout."""
    text = in_words(problem)
    console = Console(stderr=True, highlight=False)
    line = f"error: {text}"
    shown = escape(broken(line, console.width) if console.is_terminal else line)
    shown = shown.replace("error:", "[bold]error:[/]", 1)
    console.print(f"[red]{shown}[/]", soft_wrap=True)
    if as_json:
        print(json.dumps({"error": type(problem).__name__, "message": text}))


def _tell(what: RenderableType, width: int | None = None) -> None:
    """On stdout: in colours on a terminal, elsewhere without the blanks that pad a table."""
    console = Console(highlight=False, width=width)
    if console.is_terminal:
        console.print(what)
    else:
        print(plain_text(what, console.width))


def report(found: Report) -> None:
    print(found if found.remarks else "no remarks: no pass found anything to say")


@dataclass(frozen=True, slots=True)
class Outlook:
    """The findings of ``fxrl plan``."""

    plan: Plan  # with the rollout, if there is one
    advice: Advice | None  # None where nothing fits
    fits: tuple[Fit, ...]  # the frontier, if it was asked for
    tokens: int  # of the batch's rows
    rollouts: Mapping[int, RolloutMemory]  # by the tokens of their sequences
    gpus: int = 1  # that train together, of which this is one
    sharing: int = 1  # of them share a sequence


def outlook(found: Outlook, *, as_json: bool) -> None:
    """The plan, the rollout, what binds, what would help, what else would fit."""
    if as_json:
        print(json.dumps(_outlook_table(found), indent=1))
        return
    lines = [*found.plan.lines, *_gpus_lines(found), *_rollout_lines(found), *_advice_lines(found)]
    print(folded(lines, _WIDTH))
    if found.fits:
        print("\nwhat fits:")
        _tell(_frontier(found), _WIDTH)


def _outlook_table(found: Outlook) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(found.plan.to_json())
    if found.advice is not None:
        told |= asdict(found.advice)
    if (rollout := found.rollouts.get(found.tokens)) is not None:
        names = ("asked", "sequences", "most", "kv_bytes", "engine")
        own = {name: getattr(rollout, name) for name in names}
        told["rollout"] = own | {"gpu_bytes": sum(rollout.parts.values())}
    if found.gpus > 1:
        told["gpus"] = found.gpus
    if found.sharing > 1:
        told["context_parallel"] = found.sharing
    if found.fits:
        told["fits"] = [asdict(fit) | _at_once(found, fit) for fit in found.fits]
    return told


def _at_once(found: Outlook, fit: Fit) -> dict[str, int]:
    rollout = found.rollouts.get(fit.tokens)
    return {} if rollout is None else {"sequences": rollout.most}


def _gpus_lines(found: Outlook) -> list[str]:
    if found.gpus == 1:
        return []
    parts = found.plan.timeline[-1].parts
    gradients, bucket = format_bytes(parts["gradients"]), format_bytes(parts["bucket"])
    shared = f"{found.sharing} share each sequence" if found.sharing > 1 else "data parallel"
    return [
        f"{shared}: this is one of {found.gpus} GPUs of a host, with 1/{found.gpus} of its "
        f"memory; {gradients} of gradients are summed as the backward ends, {bucket} at once"
    ]


def _rollout_lines(found: Outlook) -> list[str]:
    if (rollout := found.rollouts.get(found.tokens)) is None:
        return []
    total, kv = sum(rollout.parts.values()), format_bytes(rollout.kv_bytes)
    parts = ", ".join(f"{format_bytes(size)} {what}" for what, size in rollout.parts.items())
    waiting = rollout.asked - rollout.sequences
    wait = f"; {waiting} wait for their turn" if waiting else ""
    share = 100 * rollout.kv_bytes / rollout.available
    return [
        f"rollout: {format_bytes(total)}, {rollout.sequences} sequences of {found.tokens} tokens "
        f"at once{wait}",
        f"  awake: {parts} ({share:.0f} % of what there is)",
        f"  asleep, for the update: the engine's {format_bytes(rollout.engine)} and the weights "
        f"stay, {kv} of KV cache are given back",
        f"  {rollout.most} fit at once: vllm.max_num_seqs={max(1, rollout.most)} "
        f"vllm.max_model_len={found.tokens}",
    ]


def _advice_lines(found: Outlook) -> list[str]:
    if found.advice is None:
        return ["binds: GPU memory; this batch does not fit"]
    if not found.advice.changes:
        return ["binds: nothing, all is kept"]
    most = ", then ".join(found.advice.binds)
    return [
        f"binds: {most or 'nothing much: a quarter more of anything saves less than 0.5 %'}",
        "what would help most, in seconds for as many tokens:",
        *(f"  {one.seconds:.3g} s with {one.what}" for one in found.advice.changes),
    ]


def _frontier(found: Outlook) -> Table:
    numbers = ["context", "rows", "s a step", "tokens/s", "on the host"]
    numbers += ["rollout at once"] if found.rollouts else []
    table = open_table(*numbers, right=tuple(numbers))
    for fit in found.fits:
        rate = fit.tokens * fit.rows / fit.seconds
        values = [str(fit.tokens), str(fit.rows), f"{fit.seconds:.3g}", f"{rate:,.0f}"]
        values += [format_bytes(fit.host_bytes)]
        table.add_row(*values, *map(str, _at_once(found, fit).values()))
    return table


def plan_difference(before: Plan, after: Plan, *, as_json: bool) -> None:
    """The predictions beside each other, then the sites whose choice differs."""
    from fxrl.ir.plan import differing

    changed = differing(before, after)
    if as_json:
        print(json.dumps(changed, indent=1))
        return
    table = open_table("", "before", "after", right=("before", "after"))
    for name, (old, new) in changed["predictions"].items():
        label = name.replace("_", " ")
        table.add_row(cell(label), cell(_shown(name, old)), cell(_shown(name, new)))
    _tell(table)
    for site, (old, new) in changed["choices"].items():
        print(f"\n{site}\n{folded([f'- {old}', f'+ {new}'], further=2)}")
    if not changed["choices"]:
        print("\nno choice differs")


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return format_bytes(value) if name.endswith("bytes") else f"{value:,}"


def diagnosis(found: Diagnosis) -> None:
    """Three tables, then the commands that install what is missing."""
    system = open_table("this machine", "")
    for name, value in found.system.items():
        system.add_row(cell(name), cell(value))
    for table in (
        system,
        _checks("what works", found.features),
        _checks("packages", found.packages),
    ):
        _tell(table)
        print()
    # Not in a table: a command must survive copying, and cells wrap.
    for check in found.features:
        if check.cure:
            print(f"{check.name}:\n  {check.cure}")
    if not found.healthy:
        _tell(cell("fxrl's core does not work here: see above", "bold red"))


def _checks(title: str, checks: tuple[Check, ...]) -> Table:
    table = open_table(title, "status", "", fixed=("status",))
    for check in checks:
        style = _STYLES.get(check.status, "dim")
        table.add_row(cell(check.name), cell(check.status, style), cell(check.detail))
    return table


def benchmarks(scripts: dict[str, str]) -> None:
    """The scripts of ``bench/`` with their first line of documentation."""
    table = open_table("benchmark", "what it measures", fixed=("benchmark",))
    for name, about in scripts.items():
        table.add_row(cell(name), cell(about))
    _tell(table)
    print()
    print("run one: fxrl bench NAME [its own arguments, such as --help, --json, --out FILE]")
