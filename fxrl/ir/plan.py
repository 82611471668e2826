"""The plan: what is done at each site, made when all sites are known and before anything acts.

A plan that a user gives (``Plan.from_json``) is obeyed where it names a site; everything else is
decided by the passes' own options. What came of it is ``TrainStep.plan``: a choice for every site.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from fxrl.errors import PlanError
from fxrl.ir.region import Cut
from fxrl.ir.remark import format_bytes
from fxrl.ir.table import Readable, folded
from fxrl.options import fit, hints_of, misfit

Place = Literal["gpu", "host", "again"]
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the site as it is."""

    reason: str  # why, as the report says it
    missed: bool = True  # the report counts it as missed; otherwise as a fact
    cure: str = ""  # what to do to have it rewritten anyway


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Let the pass ``by`` rewrite the site; there is nothing to choose about how."""

    by: str


@dataclass(frozen=True, slots=True)
class TileHead:
    """Rewrite a loss head by the pass ``by``, in tiles of ``tile_tokens`` rows (0: by bytes)."""

    by: str
    tile_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CutLayer:
    """What a layer's backward gets; the rest runs again.

    Attributes:
        kept: its matrix ``products``, the ``fewest`` bytes that spare these, its inputs and what
            ``attention`` returned, or its ``inputs`` alone.
        inputs_on: where the layer's own input waits for the backward, ``"gpu"`` or ``"host"``; or
            nowhere: the layer before makes it ``"again"``. So layers in a row, a segment, keep the
            first one's input alone.
        kept_on: where all else that is kept waits; or nowhere: the layer's forward runs
            ``"again"`` and hands it to the backward. Where that run makes the next one's input,
            too, attention runs twice in all.
        tile_tokens: rows per tile of its MLP, which keeps nothing then; 0 for all at once.
        head_groups: groups of KV heads that its attention runs in, one after the other, which keeps
            no more than what attention returned then; 0 for all heads at once.
        sending: of the layers up to this one that send something to the host, of how many it may
            still be on its way when this one has run; more have to be waited for. The planner sets
            it, from the budget, whatever it was; None where nothing was planned. No choice differs
            from another by it.
        fetching: of how many layers ahead of this one what they sent is on its way back while this
            one's backward runs; likewise.
    """

    kept: Cut = "products"
    inputs_on: Place = "gpu"
    kept_on: Place = "gpu"
    tile_tokens: int = 0
    head_groups: int = 0
    sending: int | None = field(default=None, compare=False)
    fetching: int | None = field(default=None, compare=False)


def in_segment(way: CutLayer, *, first: bool, last: bool) -> CutLayer:
    """What a layer does in a segment of layers that have ``way``: its input waits if it is the
    first; if it is the last it makes no other's, and need not run again ahead of its backward."""
    choice = way if first else replace(way, inputs_on="again")
    if last and way.kept_on == "again":
        choice = replace(choice, kept="inputs", kept_on="gpu")
    return choice


@dataclass(frozen=True, slots=True)
class CutHead:
    """What the backward of a trained loss head gets: its ``rows``, of which it makes the logits
    again, or their ``exponentials`` too, which spares that."""

    kept: Literal["rows", "exponentials"] = "rows"


Choice = Keep | Rewrite | TileHead | CutLayer | CutHead
_KINDS: dict[str, Any] = {
    "keep": Keep,
    "rewrite": Rewrite,
    "head": TileHead,
    "layer": CutLayer,
    "trained head": CutHead,
}


@dataclass(frozen=True, slots=True)
class Moment:
    """What is predicted to be alive on the GPU at one moment of a step."""

    # ``"rollout"``, ``"forward"``, ``"between"`` (two forwards of a loss), ``"head"``,
    # ``"backward"``, ``"end"`` or ``"sum"``.
    phase: str
    layer: int  # the layer that runs, by number; how many there are for the head, else 0
    parts: Mapping[str, int]  # what it is for -> bytes

    @property
    def bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())

    @property
    def where(self) -> str:
        """When it is, in words."""
        others = {
            "rollout": "the rollout",
            "between": "what runs between two forwards",
            "head": "the loss head",
            "end": "backward of the embeddings",
            "sum": "the sum of the ranks' gradients",
        }
        return others.get(self.phase, f"{self.phase} of layer {self.layer}")


@dataclass(frozen=True, slots=True)
class Plan(Readable):
    """A choice for each site, and what the step is predicted to take.

    Attributes:
        choices: site (see ``ir.site``) -> choice.
        peak_gpu_bytes, peak_host_bytes, step_seconds: predictions of one step, with AdamW's states
            and without the optimizer's own time; None where none was made.
        max_context: tokens of the longest sequences that some plan fits; None where nobody asked.
        timeline: the moments of a step, in order, behind a rollout if there is one; the highest is
            ``peak_gpu_bytes``.
        switched_off: ``(pass, site)`` pairs that stay as they are whatever else is said; how
            ``verify`` searches for a wrong rewrite.
    """

    choices: Mapping[str, Choice] = field(default_factory=dict)
    peak_gpu_bytes: int | None = None
    peak_host_bytes: int | None = None
    step_seconds: float | None = None
    max_context: int | None = None
    timeline: tuple[Moment, ...] = ()
    switched_off: frozenset[tuple[str, str]] = frozenset()

    def without(self, rewrites: frozenset[tuple[str, str]]) -> Plan:
        """The same plan with these passes told to leave these sites alone."""
        return replace(self, switched_off=self.switched_off | rewrites)

    def beside(self, rollout: Moment, stays: Mapping[str, int]) -> Plan:
        """This plan with a rollout before the step; ``stays`` (name -> bytes) is what the rollout
        holds during the step, too."""
        step = (replace(moment, parts={**moment.parts, **stays}) for moment in self.timeline)
        return self._along(rollout, *step)

    def followed_by(self, moment: Moment) -> Plan:
        """This plan with one more moment at the end of its timeline."""
        return self._along(*self.timeline, moment)

    def _along(self, *timeline: Moment) -> Plan:
        peak = max(moment.bytes for moment in timeline)
        return replace(self, timeline=timeline, peak_gpu_bytes=peak)

    def to_json(self) -> str:
        """The plan as JSON: ``from_json`` reads it back."""
        names = {kind: name for name, kind in _KINDS.items()}
        choices = {s: {"kind": names[type(c)], **asdict(c)} for s, c in self.choices.items()}
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        told = {"version": _VERSION, **numbers, "choices": choices}
        if self.timeline:
            told["timeline"] = [asdict(moment) for moment in self.timeline]
        return json.dumps(told, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan that ``to_json`` wrote, perhaps edited. Raises ``PlanError``, naming site and
        value, if it is none."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanError(f"the plan is no JSON: {error}") from error
        if not isinstance(data, dict) or "version" not in data:
            raise PlanError("the plan has no version, so it is none; fxrl plan --json writes one")
        if data["version"] != _VERSION:
            raise PlanError(
                f"the plan is of version {data['version']!r}, and this fxrl reads {_VERSION}; make "
                "it anew: fxrl plan --json"
            )
        choices = data.get("choices", {})
        if not isinstance(choices, dict):
            raise PlanError(f"choices={choices!r} is no table of sites")
        numbers = {name: _number(name, data.get(name)) for name in _NUMBERS}
        try:
            timeline = tuple(Moment(**moment) for moment in data.get("timeline", ()))
        except TypeError as error:
            raise PlanError(f"the plan's timeline is damaged: {error}") from error
        read = {site: _choice(site, given) for site, given in choices.items()}
        return cls(read, timeline=timeline, **numbers)

    @property
    def lines(self) -> list[str]:
        """The plan in words: what is predicted, then a line for each choice."""
        words = {site: describe(choice) for site, choice in self.choices.items()}
        choices = [f"{sites}: {what}" for sites, what in _joined(words)]
        return [*self._predicted(), *choices] or ["no sites: nothing is captured yet"]

    def text(self, width: int | None = None) -> str:
        """``lines`` folded to ``width`` columns (``None``: as the terminal)."""
        return folded(self.lines, width)

    def __str__(self) -> str:
        return self.text()

    def _predicted(self) -> list[str]:
        if self.peak_gpu_bytes is None:
            return []
        lines = [f"GPU memory: {format_bytes(self.peak_gpu_bytes)}"]
        if self.timeline:
            top = max(self.timeline, key=lambda moment: moment.bytes)
            parts = [f"{format_bytes(n)} {what}" for what, n in top.parts.items() if n]
            lines += [f"  highest in {top.where}: {', '.join(parts)}"]
        lines += [f"host memory: {format_bytes(self.peak_host_bytes or 0)}"]
        lines += [f"step: {self.step_seconds:.3g} s"] if self.step_seconds is not None else []
        lines += [f"longest context: {self.max_context} tokens"] if self.max_context else []
        return lines


def differing(before: Plan, after: Plan) -> dict[str, dict[str, tuple[Any, Any]]]:
    """All ``predictions`` of two plans, and the ``choices`` in which they differ, in words;
    layers that differ in the same way together."""
    sites = dict.fromkeys([*before.choices, *after.choices])
    pairs = {s: (before.choices.get(s), after.choices.get(s)) for s in sites}
    words = {
        s: tuple("not there" if choice is None else describe(choice) for choice in pair)
        for s, pair in pairs.items()
    }
    words = {s: pair for s, pair in words.items() if pair[0] != pair[1]}
    numbers = {name: (getattr(before, name), getattr(after, name)) for name in _NUMBERS}
    return {"predictions": numbers, "choices": dict(_joined(words))}


def _joined(by_site: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Numbered sites (``layers.3``, ``layers.4``, ``layers.6``) with equal values under one name
    (``layers.3-4,6``), where the first of them stands."""
    numbers: dict[tuple[str, Any], list[int]] = {}
    for site, value in by_site.items():
        path, _, number = site.rpartition(".")
        numbered = number.isdigit()
        of_name = numbers.setdefault((path if numbered else site, value), [])
        of_name += [int(number)] if numbered else []
    return [
        (f"{path}.{_ranges(found)}" if found else path, value)
        for (path, value), found in numbers.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: ``0-2,5``."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        follows = bool(parts) and number == parts[-1][1] + 1
        parts[-1 if follows else len(parts) :] = [(parts[-1][0] if follows else number, number)]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


_KEPT: dict[Cut, str] = {
    "products": "matrix products are kept",
    "fewest": "the fewest bytes that spare the matrix products are kept",
    "attention": "inputs and what attention returned are kept",
    "inputs": "only inputs are kept",
}
_HANDED: dict[Cut, str] = {
    "products": "matrix products",
    "fewest": "the fewest bytes that spare the matrix products",
    "attention": "what attention returned",
}
_NUMBERS = ("peak_gpu_bytes", "peak_host_bytes", "step_seconds", "max_context")


def describe(choice: Choice) -> str:
    if isinstance(choice, Keep):
        return f"stays as it is: {choice.reason}"
    if isinstance(choice, CutLayer):
        said = [f"layer: {_kept(choice)} for the backward", waiting(choice), made_again(choice)]
        said += [f"MLP in tiles of {choice.tile_tokens} rows"] if choice.tile_tokens else []
        said += [f"attention in {choice.head_groups} groups of heads"] if choice.head_groups else []
        return "; ".join(filter(None, said))
    if isinstance(choice, CutHead):
        return f"trained head: {choice.kept} are kept for the backward"
    if isinstance(choice, TileHead):
        size = f"{choice.tile_tokens} rows" if choice.tile_tokens else "the default size"
        return f"{choice.by}, in tiles of {size}"
    return choice.by


def _kept(choice: CutLayer) -> str:
    return _KEPT["inputs" if choice.kept_on == "again" else choice.kept]


def made_again(choice: CutLayer) -> str:
    """What waits nowhere for the backward, in words; empty where all does."""
    said = []
    if choice.inputs_on == "again":
        said.append("the layer before makes its input again")
    if choice.kept_on == "again" and choice.kept != "inputs":
        said.append(f"its forward runs again and hands over {_HANDED[choice.kept]}")
    return "; ".join(said)


def waiting(choice: CutLayer) -> str:
    """What waits on the host for the backward, in words; empty where nothing does."""
    places = {"its input": choice.inputs_on, "what is kept": choice.kept_on}
    away = [what for what, place in places.items() if place == "host"]
    return f"{' and '.join(away)} wait{'s' * (len(away) == 1)} on the host" if away else ""


def _number(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise PlanError(f"{name}={value!r} is no number")


def _choice(site: str, given: Any) -> Choice:
    if not isinstance(given, dict) or given.get("kind") not in _KINDS:
        raise PlanError(f"{site}: {given!r} is no choice; its kind is one of {', '.join(_KINDS)}")
    kind = _KINDS[given["kind"]]
    known = hints_of(kind)
    options = {name: value for name, value in given.items() if name != "kind"}
    for name, value in options.items():
        if name not in known:
            raise PlanError(f"{site}: {name} is unknown; a {given['kind']} has {', '.join(known)}")
        try:
            fit(known[name], value)
        except TypeError:
            raise PlanError(f"{site}: {name}={misfit(known[name], value)}") from None
        if type(value) is int and value < 0:
            raise PlanError(f"{site}: {name}={value} is below 0")
    try:
        choice: Choice = kind(**options)
    except TypeError as error:
        raise PlanError(f"{site}: {error}") from error
    return choice
