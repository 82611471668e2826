"""Writes the generated tables of README.md, bench/RESULTS.md and examples/config.md.

    python bench/readme.py               rewrites the tables in place, draws figures anew
    python bench/readme.py --check       exit code 1 and a diff when any is out of date
    python bench/readme.py --show FILE   prints what would be said of one result file

A table stands between two comments, ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; all other
text is left alone. In the README, ``passes`` comes from ``fxrl.passes.REGISTRY``, ``commands`` from
the command line's parser, ``summary`` from ``LINES`` of bench/lib/tables.py; in RESULTS.md,
``results`` from every ``bench/results/*.json``, in the order of ``FIRST`` and then of the names;
in config.md, ``keys``, ``loss`` and ``instead`` from ``fxrl.rl.config`` and ``fxrl.losses``.

A result file is one JSON object:

    title      heading of its table
    command    what ran; what a reader types is made of it (bench/lib/tables.py)
    machine    the accelerator or processor
    versions   package -> version
    date       YYYY-MM-DD
    columns    names
    rows       lists in the order of columns; null is what was not measured
    notes      sentences below the table
    readme     optional: false leaves the file out; {"columns": [...]} shows only these columns,
               {"where": {column: [values]}} only the rows with one of these values;
               {"tables": [...]} shows these instead of all rows (bench/lib/tables.py);
               {"figures": [...]} draws these (bench/lib/figures.py)

Further keys (curves, the configuration) are for other readers.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))  # run by its path

from bench.lib import figures, tables  # noqa: E402
from bench.lib.tables import PivotError, pivot, shown_commands, where  # noqa: E402

REQUIRED = ("title", "command", "machine", "versions", "date", "columns", "rows", "notes")
SHOWN_VERSIONS = (
    "python", "torch", "triton", "transformers", "vllm", "trl", "liger-kernel",
    "nvidia-cutlass-dsl", "cut-cross-entropy", "verl", "unsloth_zoo",
)  # fmt: skip
FIRST = ("head", "update_step", "rl_step", "learn", "standby", "decode_kernels")  # of file names


class ReadmeError(Exception):
    """A result file or the README does not have the expected shape."""


def passes() -> str:
    """The table of passes, in the order in which they run."""
    from fxrl.passes import REGISTRY

    rows = [(f"`{name}`", *astuple(one.doc)) for name, one in REGISTRY.items()]
    return table(("pass", "idiom", "saves", "costs", "missed when"), rows)


def commands() -> str:
    """The subcommands and their one line of help."""
    from fxrl.cli.parser import build_parser

    found = build_parser()._subparsers._group_actions[0]._choices_actions
    return table(("command", "does"), [(f"`fxrl {c.dest}`", c.help) for c in found])


def summary() -> str:
    """The few figures before all tables."""
    try:
        return table(tables.HEAD, tables.lines(ROOT / "bench" / "results"))
    except PivotError as error:
        raise ReadmeError(str(error)) from None


def keys() -> str:
    """Every key of a configuration file, a section a table."""
    from fxrl.rl.config.schema import json_schema

    schema = json_schema()
    return "\n\n".join(_key_sections("", schema, schema["$defs"]))


def _key_sections(path: str, section: dict[str, Any], definitions: dict[str, Any]) -> Iterator[str]:
    """One table's keys, then the tables in it."""
    from fxrl.rl.config.trl import KEYS

    inner = {}
    rows = []
    for name, one in section["properties"].items():
        if "$ref" in one:
            inner[f"{path}{name}"] = definitions[one["$ref"].rpartition("/")[2]]
            continue
        required = name in section.get("required", ())
        shown = "required" if required else f"`{_toml(one.get('default'))}`"
        theirs = ", ".join(f"`{trl}`" for trl, key in KEYS.items() if key == f"{path}{name}")
        about = one["description"].replace("|", "\\|")
        rows.append((f"`{name}`", _spelled(one, definitions), shown, theirs, about))
    if path:
        about = re.sub(r"^`\[[\w.]+\]`[:.] ?", "", section["description"])
        yield f"### `[{path[:-1]}]`\n\n{about[:1].upper()}{about[1:]}".rstrip()
    yield table(("key", "type", "default", "TRL's name", "what"), rows)
    for name, one in inner.items():
        yield from _key_sections(f"{name}.", one, definitions)


def _toml(value: Any) -> str:
    """A default as a file has it."""
    return "none" if value is None else json.dumps(value).replace("|", "\\|")


def _spelled(schema: dict[str, Any], definitions: dict[str, Any]) -> str:
    """A type in words."""
    if "anyOf" in schema:
        return " or ".join(_spelled(one, definitions) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(word)}`" for word in schema["enum"])
    if "$ref" in schema:
        section = definitions[schema["$ref"].rpartition("/")[2]]
        return f"table with {', '.join(f'`{name}`' for name in section['properties'])}"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list: {_spelled(schema['items'], definitions)}"
    words = {"integer": "whole number", "string": "text", "boolean": "true, false"}
    words["object"] = "table"
    low = "exclusiveMinimum" if "exclusiveMinimum" in schema else "minimum"
    limits = {"minimum": "from {:g}", "exclusiveMinimum": "above {:g}", "maximum": "up to {:g}"}
    said = [limits[name].format(schema[name]) for name in (low, "maximum") if name in schema]
    regex = " (regular expression)" if schema.get("format") == "regex" else ""
    return " ".join([words.get(kind, kind) + regex, *said])


def loss() -> str:
    """The keywords that every policy loss takes."""
    from fxrl.losses.options import PolicyOptions
    from fxrl.rl.config.schema import documented

    about = documented(PolicyOptions)[1]
    rows = [(f"`{f.name}`", f"`{_toml(f.default)}`", about[f.name]) for f in fields(PolicyOptions)]
    return table(("key", "default", "what"), rows)


def instead() -> str:
    """TRL's names that are no key here, and what there is instead."""
    from fxrl.rl.config.trl import INSTEAD

    names: dict[str, list[str]] = {}
    for name, answer in INSTEAD.items():
        names.setdefault(answer, []).append(f"`{name}`")
    rows = [(", ".join(found), answer) for answer, found in names.items()]
    return table(("TRL's name", "here"), rows)


def results(folder: Path | None = None) -> str:
    """One section per result file; files of one title say in it which they are."""
    files = sorted((folder or ROOT / "bench" / "results").glob("*.json"), key=_place)
    sections = {file.stem: section for file in files if (section := _result(file))}
    titles = Counter(section.partition("\n")[0] for section in sections.values())
    for stem, section in sections.items():
        title, line, rest = section.partition("\n")
        if titles[title] > 1:
            sections[stem] = f"{title} ({stem}){line}{rest}"
    return "\n\n".join(sections.values()) or "Nothing is measured yet."


def _place(file: Path) -> tuple[int, str]:
    ranks = (rank for rank, start in enumerate(FIRST) if file.name.startswith(start))
    return next(ranks, len(FIRST)), file.name


def _result(file: Path) -> str:
    """One file's heading, table and notes; empty if it is left out."""
    record = json.loads(file.read_text(encoding="utf-8"))
    if missing := [key for key in REQUIRED if key not in record]:
        raise ReadmeError(f"{file.name} lacks {', '.join(missing)}")
    columns = list(record["columns"])
    if bad := [row for row in record["rows"] if len(row) != len(columns)]:
        raise ReadmeError(f"{file.name}: row {bad[0]} has {len(bad[0])} of {len(columns)} columns")
    choice = record.get("readme", {})
    if choice is False:
        return ""
    try:
        body = _pivots(record) if "tables" in choice else _rows(record, choice)
    except PivotError as error:
        raise ReadmeError(f"{file.name}: readme.{error}") from None
    versions = [f"{k} {record['versions'][k]}" for k in SHOWN_VERSIONS if k in record["versions"]]
    typed = ", ".join(f"`{command}`" for command in shown_commands(record["command"]))
    source = f"{record['machine']}, {', '.join(versions)}, {record['date']}; {typed}"
    notes = [f"- {note}" for note in record["notes"]]
    body = "\n\n".join([body, *(_figure(record, file, name) for name in figures.wanted(record))])
    return "\n".join(
        [f"### {record['title']}", "", body, "", source, *([""] if notes else []), *notes]
    )


def _rows(record: dict[str, Any], choice: dict[str, Any]) -> str:
    """All rows, or the chosen ones and columns of them."""
    columns = list(record["columns"])
    chosen = where(columns, record["rows"], choice.get("where", {}), "where")
    shown = choice.get("columns") or _measured(columns, chosen)
    if unknown := [name for name in shown if name not in columns]:
        raise PivotError(f"columns has {unknown}, columns are {columns}")
    picks = [columns.index(name) for name in shown]
    rows = [[_cell(row[i]) for i in picks] for row in chosen]
    return table([name.replace("_", " ") for name in shown], rows)


def _pivots(record: dict[str, Any]) -> str:
    """One small table for each that has rows; below them, why cells failed."""
    parts: list[str] = []
    errors: dict[str, None] = {}  # a set in the order of its making
    for spec in record["readme"]["tables"]:
        head, lines, failed = pivot(record["columns"], record["rows"], spec)
        for name, error in failed.items():
            errors.setdefault(f"{name}: {_cell(error)}")
        if lines:
            parts += [f"**{spec['title']}**", table(head, lines)]
    if errors:
        parts.append("\n".join(["Failed (!) or not there (n/a):", "", *(f"- {e}" for e in errors)]))
    return "\n\n".join(parts)


def _figure(record: dict[str, Any], file: Path, name: str) -> str:
    """The Markdown of one figure, its place told from the folder of RESULTS.md."""
    shown, here = figures.path_of(file, name), ROOT / "bench"
    place = shown.relative_to(here) if shown.is_relative_to(here) else shown
    return f"![{record['title']}: {name}]({place.as_posix()})"


def stale_figures(folder: Path | None = None) -> list[tuple[Path, dict[str, Any], str]]:
    """Result file, its record and the figure's name, of all that do not show its rows."""
    found = []
    for file in sorted((folder or ROOT / "bench" / "results").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        for name in figures.wanted(record):
            if not figures.is_current(record, file, name):
                found.append((file, record, name))
    return found


def _measured(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The columns in which any row has a value."""
    return [name for i, name in enumerate(columns) if any(row[i] is not None for row in rows)]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def table(columns: Iterable[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


Sections = dict[str, Callable[[], str]]
FILES: dict[str, Sections] = {
    "README.md": {"passes": passes, "commands": commands, "summary": summary},
    "bench/RESULTS.md": {"results": results},
    "examples/config.md": {"keys": keys, "loss": loss, "instead": instead},
}


def fill(text: str, sections: Sections, file: str = "README.md") -> str:
    """The ``text`` of ``file`` with every section between its two comments made anew."""
    for name, make in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ReadmeError(f"{file} must have {begin} and {end} once")
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrites or checks the files."""
    parser = argparse.ArgumentParser(description=f"Write the tables of {' and '.join(FILES)}.")
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if out of date")
    parser.add_argument("--show", metavar="FILE", type=Path, help="print one result file's section")
    args = parser.parse_args(argv)
    try:
        if args.show:
            print(_result(args.show))
            return 0
        return _check() if args.check else _write()
    except (ReadmeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _write() -> int:
    """The files, and the figures that are out of date."""
    made = {file: new for file, _, new in _texts()}
    for file, record, name in stale_figures():
        figures.draw(record, file, name)
    for name, new in made.items():
        (ROOT / name).write_text(new, encoding="utf-8")
    return 0


def _check() -> int:
    """1, and what differs, if a file or a figure is out of date."""
    stale = []
    for file, old, new in _texts():
        if new != old:
            stale.append(file)
            pair = old.splitlines(True), new.splitlines(True)
            sys.stdout.writelines(difflib.unified_diff(*pair, file, f"{file} as generated"))
    stale += [figures.path_of(file, name).name for file, _, name in stale_figures()]
    if stale:
        print(f"{', '.join(stale)} out of date; run python bench/readme.py", file=sys.stderr)
    return int(bool(stale))


def _texts() -> Iterator[tuple[str, str, str]]:
    """Each file's name, its text and its text made anew."""
    for file, sections in FILES.items():
        old = (ROOT / file).read_text(encoding="utf-8")
        yield file, old, fill(old, sections, file)


if __name__ == "__main__":
    sys.exit(main())
