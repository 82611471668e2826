"""Binds nested tables (TOML, ``key=value`` overrides) to frozen dataclasses.

Every problem is collected, none raised: the user sees all wrong keys and values at once.

NOTE [Why not pydantic]
The tree is small, ``tomllib`` and ``dataclasses`` are in the standard library, and the one thing we
need beyond types - the nearest right name over the whole tree - would be written by hand anyway.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from fxrl.errors import ConfigError
from fxrl.options import Check, Options, dataclass_in, fit, hints_of, misfit
from fxrl.rl.errors import BadConfigError

T = TypeVar("T")
REST = {"rest": True}
"""Field metadata: this mapping takes the keys of its table that no other field names."""
COUNTED = {"counted": True}
"""Field metadata: written down by its number of entries, not whole."""


def keys_of(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass by name, without that which takes the rest."""
    return {f.name: f for f in dataclasses.fields(cls) if not f.metadata.get("rest")}


def default_of(field: dataclasses.Field[Any]) -> Any:
    """``MISSING`` where there is none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _uncompiled(value: str) -> str | None:
    try:
        re.compile(value)
    except re.error as error:
        return f"is no regular expression: {error}"
    return None


regular_expression = Check(_uncompiled, {"format": "regex"})


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """An override's value: what TOML makes of it, and the text as typed for string fields."""

    raw: str
    value: Any


def parse_override(text: str, problems: list[str]) -> tuple[tuple[str, ...], Text] | None:
    """``"optim.lr=1e-5"`` -> ``(("optim", "lr"), Text("1e-5", 1e-5))``."""
    key, equals, raw = text.partition("=")
    parts = tuple(part.strip() for part in key.split("."))
    if not equals or not all(parts):
        problems.append(f"{text!r} is not an override; write key=value, such as optim.lr=1e-5")
        return None
    raw = raw.strip()
    if raw.lower() in ("none", "null"):
        return parts, Text(raw, None)
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        value = raw  # a bare word: run_dir=runs/first
    return parts, Text(raw, value)


MOST_NESTED = 100
"""Tables and lists in one another: what reads, copies and prints them calls itself for each."""
TOO_DEEP = f"more than {MOST_NESTED} tables and lists in one another"
_KEY = re.compile(r"\s*(\[|[^#=]+=)")


def read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadConfigError(f"{path}: cannot be read: {why} (seen from {Path.cwd()})") from error
    lines = text.split("\n")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, _, place = str(error).partition(" (at ")
        found = re.match(r"line (\d+)", place)
        number = int(found[1]) if found else len(lines)
    except RecursionError:
        why = TOO_DEEP
        depths = accumulate(
            len(re.findall(r"[\[{]", s)) - len(re.findall(r"[\]}]", s)) for s in lines
        )
        number = next((n for n, depth in enumerate(depths, 1) if depth > MOST_NESTED), 1)
    except ValueError as error:  # more digits than Python converts
        why = str(error).partition(";")[0]
        number = next((n for n, s in enumerate(lines, 1) if re.search(r"[\d_]{4300}", s)), 1)
    # An error is told where a value ends; its key may stand in a line above.
    start = next((n for n in range(number, 0, -1) if _KEY.match(lines[n - 1])), number)
    raise BadConfigError(f"{path}:{start}: not TOML: {why}: {lines[start - 1].strip()[:80]}")


_INSTEAD = {"steps": "epochs", "epochs": "steps"}
"""An override of the one replaces the other of the file."""


def read_tables(path: Path, overrides: Sequence[str], problems: list[str]) -> dict[str, Any]:
    """The tables of a file with the overrides in them."""
    table = read_toml(path)
    for override in overrides:
        if (parsed := parse_override(override, problems)) is not None:
            table.pop(_INSTEAD.get(parsed[0][0], ""), None)
            merge_override(table, *parsed)
    if lines := [f"  {line}" for line in unfit(table)]:
        raise BadConfigError("\n".join([f"{path}: no key can hold", *lines[:10]]))
    return table


def entries(values: Any) -> Iterator[tuple[str, Any, int]]:
    """Dotted name, value and depth of whatever is in a tree, down to one level too deep."""
    waiting = [("", values, 0)]
    while waiting:
        name, value, depth = waiting.pop()
        value = value.value if isinstance(value, Text) else value
        yield name, value, depth
        if depth > MOST_NESTED:
            continue
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}".lstrip("."), v, depth + 1) for key, v in value.items()]
        elif isinstance(value, list):
            waiting += [(name, inner, depth + 1) for inner in value]


def unfit(table: Mapping[str, Any]) -> Iterator[str]:
    """What no key can hold, a line each: numbers beyond TOML's 64 bits, deep nesting."""
    for name, value, depth in entries(table):
        if depth > MOST_NESTED:
            yield f"{name[:40]}: {TOO_DEEP}"
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            yield f"{name}={str(value)[:20]}... is beyond 64 bits"


def merge_override(table: dict[str, Any], path: Sequence[str], value: Text) -> None:
    """Sets ``table[path[0]][path[1]]...``, making tables on the way."""
    for part in path[:-1]:
        inner = _untyped(table.get(part))  # of a table that another override gave
        table[part] = inner = dict(inner) if isinstance(inner, Mapping) else {}
        table = inner
    table[path[-1]] = value


def bind(
    cls: type[T],
    table: Mapping[str, Any],
    problems: list[str],
    *,
    path: str = "",
    suggest: _Suggester | None = None,
) -> T | None:
    """An instance of dataclass ``cls``, without wrong keys; ``None`` where a value is wrong.
    ``problems`` gets a line for each; ``path`` is the dotted name of ``table`` in them, and
    ``suggest`` the cure for a wrong key.

    NOTE [Why what does not fit is left unset]: a default in its place would be judged together with
    other keys, and what is said of it would not be true. Checks end where they read such a key.
    """
    suggest = suggest or _Suggester(cls)
    fields = keys_of(cls)
    rest = next((f.name for f in dataclasses.fields(cls) if f.metadata.get("rest")), None)  # type: ignore[arg-type]
    hints = hints_of(cls)
    values: dict[str, Any] = {rest: {}} if rest else {}
    unfit: set[str] = set()
    for key, value in table.items():
        name, plain = f"{path}{key}", value.value if isinstance(value, Text) else value
        if key not in fields:
            if rest:
                values[rest][key] = _untyped(value)
            else:
                problems.append(f"{name}: no such key{suggest(name)}")
        elif (inner := dataclass_in(hints[key])) and isinstance(plain, Mapping):
            made = bind(inner, plain, problems, path=f"{name}.", suggest=suggest)
            if made is None:
                unfit.add(key)
            else:
                values[key] = made
        else:
            try:
                raw = value.raw if isinstance(value, Text) else None
                values[key] = fit(hints[key], _untyped(value), raw)
            except TypeError:
                unfit.add(key)
                cure = suggest.within(name) if inner else ""
                problems.append(f"{name}={misfit(hints[key], _untyped(value))}{cure}")
    missing = {key for key in fields if default_of(fields[key]) is MISSING} - values.keys()
    problems += [f"{path}{key}: missing; it has no default" for key in missing - unfit]
    found, lines = _made(cls, values, unfit | missing)
    told = (f"{path}{line}" for line in lines)
    problems += [line for line in told if re.split(r"[^\w.]", line)[0] not in suggest.meant]
    return found


def _made(cls: type[T], values: Mapping[str, Any], unfit: set[str]) -> tuple[T | None, list[str]]:
    """The instance, if all is as it shall be; and what its own checks find, as far as they go."""
    if not unfit:
        try:
            return cls(**values), []
        except ConfigError as error:
            return None, str(error).splitlines()
    lines: list[str] = []
    if issubclass(cls, Options):
        made = object.__new__(cls)
        for field in dataclasses.fields(cls):  # type: ignore[arg-type]
            if field.name not in unfit:
                object.__setattr__(made, field.name, values.get(field.name, default_of(field)))
        with suppress(AttributeError):
            lines.extend(made.wrong())
    return None, lines


def counted(mistakes: Sequence[str]) -> str:
    return f"{len(mistakes)} mistakes" if len(mistakes) > 1 else "1 mistake"


def dotted_names(cls: type[Any], path: str = "") -> Iterator[str]:
    """Every key of the tree, such as ``optim.lr``."""
    hints = hints_of(cls)
    for key in keys_of(cls):
        yield f"{path}{key}"
        if inner := dataclass_in(hints[key]):
            yield from dotted_names(inner, f"{path}{key}.")


class _Suggester:
    """The cure for a wrong key: what it means (``KEY_ALIASES``, ``KEY_ANSWERS``), else is like."""

    def __init__(self, cls: type[Any]) -> None:
        self._names = sorted(dotted_names(cls), key=lambda name: -name.count("."))
        by_leaf = {name.rpartition(".")[2]: name for name in self._names}
        self._answers: Mapping[str, str] = getattr(cls, "KEY_ANSWERS", {})
        self._near: Mapping[str, str] = by_leaf | getattr(cls, "KEY_ALIASES", {})
        self.meant: set[str] = set()  # the keys named so; that they are not given is no news

    def __call__(self, name: str) -> str:
        leaf = name.rpartition(".")[2]
        if leaf in self._answers:
            return f"; {self._answers[leaf]}"
        close = [self._near[leaf]] if leaf in self._near else []
        close += difflib.get_close_matches(name, self._names, n=2, cutoff=0.7)
        close += [self._near[one] for one in difflib.get_close_matches(leaf, self._near, n=1)]
        near = next((one for one in close if not name.startswith(f"{one}.")), None)
        self.meant |= {near} if near else set()
        return f"; did you mean {near!r}?" if near else ""

    def within(self, table: str) -> str:
        """The cure for a value where a table belongs: the key that the table's name stands for
        (``optim="adamw"``: ``optim.name``), else all that it has."""
        if self._near.get(table.rpartition(".")[2], table) != table:
            return self(table)
        above = (name.rpartition(".") for name in self._names)
        keys = sorted(key for outer, _, key in above if outer == table)
        return f"; its keys are {', '.join(keys)}"


def _untyped(value: Any) -> Any:
    """Overrides by their values, also those inside of tables that take any keys."""
    if isinstance(value, Text):
        return value.value
    if isinstance(value, Mapping):
        return {key: _untyped(inner) for key, inner in value.items()}
    return value
