"""What the commands print: tables for people, one JSON document (or JSON lines) for tools.

stdout carries the answer, stderr everything else, so that pipes stay clean.
"""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fxrl.doctor import Check, Diagnosis
from fxrl.errors import FxrlError
from fxrl.ir.plan import Plan, differing
from fxrl.ir.remark import Report, format_bytes
from fxrl.ir.table import cell, open_table

_STYLES = {"ok": "green", "missing": "yellow", "wrong version": "yellow", "broken": "bold red"}


def as_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, default=str))


def status(message: str) -> None:
    """One grey line on stderr: what is going on."""
    Console(stderr=True, highlight=False).print(f"[dim]{escape(message)}[/]", soft_wrap=True)


def error(problem: FxrlError, *, as_json: bool) -> None:
    """One red line on stderr; with ``--json`` also an object on stdout."""
    console = Console(stderr=True, highlight=False)
    console.print(f"[bold red]error:[/] [red]{escape(str(problem))}[/]", soft_wrap=True)
    if as_json:
        print(json.dumps({"error": type(problem).__name__, "message": str(problem)}))


def report(found: Report) -> None:
    """The report's own table and totals."""
    print(found if found.remarks else "no remarks: no pass found anything to say")


def plan_difference(before: Plan, after: Plan, *, as_json: bool) -> None:
    """The predictions beside each other, then the sites whose choice differs."""
    changed = differing(before, after)
    if as_json:
        print(json.dumps(changed, indent=1))
        return
    table = open_table("", "before", "after", right=("before", "after"))
    for name, (old, new) in changed["predictions"].items():
        label = name.replace("_", " ")
        table.add_row(cell(label), cell(_shown(name, old)), cell(_shown(name, new)))
    Console(highlight=False).print(table)
    for site, (old, new) in changed["choices"].items():
        print(f"\n{site}\n- {old}\n+ {new}")
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
        Console(highlight=False).print(table, "")
    # Not in a table: a command must survive copying, and cells wrap.
    for check in found.features:
        if check.cure:
            print(f"{check.name}:\n  {check.cure}")
    if not found.healthy:
        Console(highlight=False).print("[bold red]fxrl's core does not work here: see above[/]")


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
    Console(highlight=False).print(table, "")
    print("run one: fxrl bench NAME [its own arguments, such as --help, --json, --out FILE]")
