"""Options as frozen dataclasses whose annotations say what fits: kinds, and ranges of them.

``steps: Annotated[int, at_least(1)] = 100`` is checked where the dataclass is made, told where
tables are bound to it (``fxrl.rl.config``), and written down in the schema of the file. A text
beside a range is the cure where a value is of no such kind.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fxrl.errors import ConfigError, nearest, shown


class Options:
    """A frozen dataclass whose fields must be of their kind and in their range; other conditions
    are checked by ``problems``. ``None`` is in every range, and a list becomes the tuple that it
    stands for. Raises ``unfit``, with a line per unfit value."""

    __slots__ = ()
    unfit: ClassVar[type[ConfigError]] = ConfigError

    def __post_init__(self) -> None:
        cls: Any = type(self)
        lines = []
        for name, option in _options_of(cls).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, fit(option.hint, value))
            except TypeError:
                lines.append(f"{name}={misfit(option.hint, value)}{_behind(option.cure)}")
        if lines or (lines := [*self.wrong()]):
            raise self.unfit("\n".join(lines))

    def wrong(self) -> Iterator[str]:
        """What is out of its range, and ``problems``."""
        cls: Any = type(self)
        for name, option in _options_of(cls).items():
            value = getattr(self, name, None)  # of an unfit value there is none
            said = value is not None and next(filter(None, (c(value) for c in option.checks)), None)
            if said:
                yield f"{name}={shown(value)} {said}"
        yield from self.problems()

    def problems(self) -> Iterable[str]:
        """What is wrong besides ranges; each line starts with the key."""
        return ()


class _Option(NamedTuple):
    """What an annotation says of a field."""

    hint: Any  # its kind, without ranges
    checks: list[Check]  # its ranges, also of what may be None
    cure: str  # what to write instead of a value of another kind


def hints_of(cls: Any) -> dict[str, Any]:
    """The kinds of a dataclass's fields by name, without their ranges."""
    return {name: option.hint for name, option in _options_of(cls).items()}


@functools.cache
def _options_of(cls: Any) -> dict[str, _Option]:
    hints, found = typing.get_type_hints(cls), {}
    annotated = typing.get_type_hints(cls, include_extras=True)
    for name in (field.name for field in dataclasses.fields(cls)):
        kinds = (annotated[name], *typing.get_args(annotated[name]))
        told = [one for kind in kinds for one in getattr(kind, "__metadata__", ())]
        checks = [one for one in told if isinstance(one, Check)]
        cure = next((one for one in told if isinstance(one, str)), "")
        found[name] = _Option(hints[name], checks, cure)
    return found


# ---------------------------------------------------------------------------- ranges
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Check:
    """A range; stands in ``Annotated`` types."""

    wrong: Callable[[Any], str | None]  # what is wrong with a value, if anything
    schema: Mapping[str, Any]  # the range in JSON schema's words

    def __call__(self, value: Any) -> str | None:
        if isinstance(value, float) and not math.isfinite(value):
            return "is not a finite number"
        return self.wrong(value)


def at_least(low: float, cure: str = "") -> Check:
    """``low`` and above; ``cure`` ends the message."""
    words = f"is below {low:g}{_behind(cure)}"
    return Check(lambda v: None if v >= low else words, {"minimum": low})


def above(low: float, cure: str = "") -> Check:
    words = f"must be above {low:g}{_behind(cure)}"
    return Check(lambda v: None if v > low else words, {"exclusiveMinimum": low})


def within(low: float, high: float, cure: str = "") -> Check:
    """From ``low`` to ``high``, both included."""
    words = f"is outside [{low:g}, {high:g}]{_behind(cure)}"
    return Check(lambda v: None if low <= v <= high else words, {"minimum": low, "maximum": high})


def _behind(cure: str) -> str:
    return f"; {cure}" if cure else ""


Positive = Annotated[int, at_least(1)]


# ---------------------------------------------------------------------------- kinds
def fit(hint: Any, value: Any, raw: str | None = None) -> Any:
    """``value`` as type ``hint``; raises ``TypeError`` where it is none. ``raw`` is the text as it
    was typed, for what a text fits."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for kind in args:
            with suppress(TypeError):
                return fit(kind, value, raw)
    elif origin is Literal:
        if raw in args:
            return raw  # "none" may be one of the words
        if any(value == arg and type(value) is type(arg) for arg in args):
            return value
    elif origin is tuple and isinstance(value, Sequence) and not isinstance(value, str):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            return tuple(fit(kind, item) for kind, item in zip(kinds, value, strict=True))
    elif origin is Callable:
        if callable(value):
            return value
    elif origin is None:
        return _fit_scalar(hint, value, raw)
    elif isinstance(value, Mapping) and issubclass(origin, Mapping):
        return value
    raise TypeError


def _fit_scalar(hint: Any, value: Any, raw: str | None) -> Any:
    if hint is Any:
        return value
    if hint is str and raw is not None and value is not None:
        return value if isinstance(value, str) else raw
    if hint is float and type(value) is int:
        return float(value)
    if isinstance(value, hint) and isinstance(value, bool) == (hint is bool):
        return value
    raise TypeError


def in_files(hint: Any) -> bool:
    """Whether a file can hold it: all but what only Python gives, a model or a function."""
    known = hint in (*_WORDS, Any, type(None)) or dataclasses.is_dataclass(hint)
    return known or typing.get_origin(hint) not in (None, Callable)


_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def spelled(hint: Any) -> str:
    """A kind in words."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(
            "none" if arg is type(None) else spelled(arg) for arg in args if in_files(arg)
        )
    if origin is tuple:
        if args[-1] is Ellipsis:
            return f"a list, each entry {spelled(args[0])}"
        return f"a list of {len(args)}, each {spelled(args[0])}"
    if dataclass_in(hint) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "a table"
    return _WORDS.get(hint, str(hint))


def misfit(hint: Any, value: Any) -> str:
    """What a message says of a value that is none of a kind, with the nearest word that is."""
    words = typing.get_args(hint) if typing.get_origin(hint) is Literal else ()
    return f"{shown(value)} is not {spelled(hint)}{nearest(str(value), words)}"


def dataclass_in(hint: Any) -> type[Any] | None:
    """The dataclass that a type is, or may be."""
    for kind in (hint, *typing.get_args(hint)):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            return kind
    return None
