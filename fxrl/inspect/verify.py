"""``verify``: the optimized step against eager, value by value, and which rewrite is to blame.

Both run from one random state; gradients, buffers, flags and random state are put back, so a
verified training goes on as if nothing had been. Tolerances: ``compare``.

Which rewrites are to blame is found by delta debugging over sets of sites that are left on (Zeller
and Hildebrandt, IEEE Trans. Softw. Eng. 28(2), 2002): one wrong site among ``n`` costs about
``2 log2 n`` trials; sites that are wrong only together are found as a group.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fxrl.capture._torch import tensors_in
from fxrl.errors import VerificationError, check_one_of
from fxrl.inspect.calibrate import in_words, nearness
from fxrl.inspect.compare import Tolerances, VerifyReport, compare
from fxrl.inspect.emulate import Emulation
from fxrl.inspect.evaluate import (
    EvaluationError,
    LossFn,
    Outcome,
    Precision,
    Step,
    TruthError,
    evaluate,
    evaluate_wider,
    named_trainable,
    watch_precision,
)
from fxrl.ir.capture_record import Capture
from fxrl.ir.graph import COPIES, ancestors, example_of, held, is_call, is_view, needs_grad
from fxrl.ir.source import source_of_trace
from fxrl.ops.rounded import RoundedWeight

Reference = Literal["auto", "eager", "float32", "float64"]
Rewrite = tuple[str, str]
_HALF = (torch.bfloat16, torch.float16)


def verify_step(
    model: nn.Module,
    loss_fn: LossFn,
    step: Step,
    batch: Any,
    *,
    reference: Reference = "auto",
) -> VerifyReport:
    """Compare ``step(batch)`` with ``loss_fn(model, batch)``: loss, metrics, gradients, buffers.

    Args:
        model: what ``loss_fn`` is called with.
        loss_fn: returns a scalar loss or ``(loss, {"name": value})``.
        step: the optimized step; ``step.captures`` say what was rewritten, and on a failure
            ``step.without`` makes it without some of that, once a trial of the search.
        batch: any pytree; gradients of its tensors that require grad are compared too.
        reference: ``"eager"`` compares with eager itself; ``"float32"`` and ``"float64"`` with a
            run of the model in that dtype; ``"auto"`` takes ``"float32"`` for half precision
            where memory allows and the loss draws no random numbers, else ``"eager"``.

    Raises:
        VerificationError: eager cannot run the batch, or the step fails where eager runs.
        TruthError: ``reference`` names a dtype, and the model cannot run in it.
        ConfigError: ``reference`` is none of the four.
    """
    check_one_of("reference", reference, get_args(Reference))
    params = named_trainable(model, loss_fn)
    known = _References(model, loss_fn, params, batch, reference)
    eager = known.under(())[0]  # which says first whether the user's own code runs
    notes: list[str] = []

    def judge(candidate: Step) -> VerifyReport:
        ours = evaluate(candidate, model, params, batch)
        running = [one for one in getattr(candidate, "captures", ()) if one.running]
        eager, truth, used, told, tolerances = known.under(running)
        rows = compare(ours, eager, truth, tolerances)
        return VerifyReport(all(row.ok for row in rows), rows, (), used, told)

    try:
        report = judge(step)
    except Exception as error:  # whatever the compiled code raises is the finding
        blame, why = _search(judge, step)
        raise VerificationError(
            f"the optimized step fails where eager runs: {type(error).__name__}: {error}; "
            f"to blame: {', '.join(blame) or 'unknown'}{f' ({why})' if why else ''}"
        ) from error
    if eager.drew_random and not report.ok:
        notes.append(
            "the loss draws random numbers, and compiled code may draw others from one seed; "
            "verify again with dropout 0 or model.eval()"
        )
    if not eager.loss.isfinite():
        notes.append(f"the loss of this batch is {eager.loss.item()}, in eager, too")
    if all(gradient is None for gradient in eager.grads.values()):
        notes.append("no parameter gets a gradient, in eager either: only the loss was compared")
    blame, why = ((), "") if report.ok else _search(judge, step)
    return replace(report, blame=blame, notes=(*report.notes, *notes, *([why] if why else [])))


_Reference = tuple[Outcome, Outcome | None, str, tuple[str, ...], Tolerances]


@dataclass
class _References:
    """What a step is compared with: the loss as it is written, under the roundings of the step.

    NOTE [Why the reference rounds too]: products in FP8 are other numbers than those that were
    asked for, by as much as a mistake would make. Whether they are the numbers that FP8 gives, only
    a run tells that rounds what the step rounds (``Emulation``), in eager and in a wider dtype.
    """

    model: nn.Module
    loss_fn: LossFn
    params: dict[str, Tensor]
    batch: Any
    asked: Reference
    known: dict[frozenset[Rewrite], _Reference] = field(default_factory=dict)

    def under(self, captures: Sequence[Capture]) -> _Reference:
        """Eager, the wider run if there is one, its name, notes, and tolerances."""
        weights = [weight for one in captures for weight in one.rounded()]
        key = frozenset(pair for one in captures for pair in one.rewrites if weights)
        if key not in self.known:
            with Emulation(weights) if weights else nullcontext():
                self.known[key] = self._run(weights)
        eager, truth, used, notes, tolerances = self.known[key]
        lowered = [one.lowered for one in captures if one.lowered is not None]
        for dtype in {dtype for gm in lowered for dtype in _rounded_to(gm)}:
            tolerances = tolerances.at(dtype)
        return eager, truth, used, notes, tolerances

    def _run(self, weights: Sequence[RoundedWeight]) -> _Reference:
        rounded = bool(weights)
        eager, precision = self._eager()
        truth, used, notes = self._wider(eager, precision, rounded)
        if rounded:
            used = f"{used}, rounded as the step is"
            notes = [*notes, *in_words(nearness(weights))]
        terms = _longest_reduction(self.params, self.batch)
        tolerances = Tolerances(precision.dtype, precision.calls, terms, rounded)
        return eager, truth, used, tuple(notes), tolerances

    def _eager(self) -> tuple[Outcome, Precision]:
        model = self.model
        try:
            with watch_precision(model) as precision:
                step = functools.partial(self.loss_fn, model)
                eager = evaluate(step, model, self.params, self.batch)
        except EvaluationError:
            raise
        except Exception as error:  # user code
            place = source_of_trace("".join(traceback.format_tb(error.__traceback__)))
            raise VerificationError(
                f"the loss fails in eager mode, so there is nothing to compare with: "
                f"{type(error).__name__}: {error}, at {place}; "
                "cure: make loss_fn(model, batch) run first"
            ) from error
        for value in (*model.parameters(), eager.loss):
            precision.see(value.dtype)
        return eager, precision

    def _wider(
        self, eager: Outcome, precision: Precision, rounded: bool
    ) -> tuple[Outcome | None, str, list[str]]:
        """The wider run if there is one, the name of what is compared with, and notes."""
        asked, own = self.asked, precision.dtype
        wanted = (*_HALF, torch.float32) if rounded else _HALF
        if asked == "eager" or (asked == "auto" and own not in wanted):
            return None, "eager", []
        if asked == "auto" and eager.drew_random:
            note = "random numbers may depend on the dtype, so there is no wider reference"
            return None, "eager", [note]
        used = ("float32" if own in _HALF else "float64") if asked == "auto" else asked
        wide: torch.dtype = getattr(torch, used)
        if torch.finfo(own).eps <= torch.finfo(wide).eps:
            return None, "eager", [f"{used} is no wider than {own}, so eager is as good"]
        try:
            return evaluate_wider(self.model, self.loss_fn, self.batch, wide), used, []
        except TruthError as error:
            if asked != "auto":
                raise
            return None, "eager", [f"no wider reference: {error}"]


def _search(judge: Callable[[Step], VerifyReport], step: Any) -> tuple[tuple[str, ...], str]:
    """Blamed rewrites as ``pass @ site``, and why they are not all or not known."""
    # All that was rewritten and runs, normalising passes and bodies of regions included; known
    # when the step has run.
    running = (one for one in getattr(step, "captures", ()) if one.running)
    rewrites = list(dict.fromkeys(pair for one in running for pair in one.rewrites))
    if not rewrites:
        return (), "nothing was rewritten, so no rewrite can be blamed"

    def fails(enabled: frozenset[Rewrite]) -> bool:
        try:
            return not judge(step.without(frozenset(rewrites) - enabled)).ok
        except Exception:  # a step that raises is as wrong as one that miscounts
            return True

    blamed, why = find_blame(rewrites, fails)
    return tuple(f"{name} @ {site}" for name, site in blamed), why


def _rounded_to(gm: fx.GraphModule) -> Iterator[torch.dtype]:
    """The dtypes of results that are computed of floats, on the way to what has a gradient.

    NOTE [Why the captured graph is asked]: modules tell what they return, and a norm that computes
    in float32 returns float64 in a model of that. What passes through such a cast is rounded to
    float32 in both runs, at numbers that may differ in their last bit, so no more can be asked of
    it. The graph is the one ahead of all passes: a pass that rounds more is found out.
    """
    returned = gm.graph.output_node().all_input_nodes
    for node in ancestors([one for one in returned if needs_grad(one)] or returned):
        body = held(node) if node.op == "get_attr" else None
        if isinstance(body, fx.GraphModule):
            yield from _rounded_to(body)
        elif node.op == "call_function" and not is_view(node):
            read = {dtype for one in node.all_input_nodes for dtype in _dtypes(one)}
            made = _dtypes(node) if read else set()
            yield from made - read if is_call(node, *COPIES) else made


def _dtypes(node: fx.Node) -> set[torch.dtype]:
    """Those of a value's floats; 8-bit ones are a format of storage."""
    values = tensors_in(example_of(node))
    return {x.dtype for x in values if x.is_floating_point() and x.itemsize > 1}


def _longest_reduction(params: dict[str, Tensor], batch: Any) -> int:
    """Upper bound of the terms of a sum: the largest parameter dim, or all items of the batch."""
    dims = [size for parameter in params.values() for size in parameter.shape]
    items = [leaf.numel() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return max([1, *dims, *items])


S = TypeVar("S", bound=Hashable)
MAX_TRIALS = 64  # each compiles the step anew


class _TrialsSpent(Exception):
    """No trial is left; the search keeps what it has."""


def find_blame(
    sites: Sequence[S],
    fails: Callable[[frozenset[S]], bool],
    *,
    max_trials: int = MAX_TRIALS,
) -> tuple[tuple[S, ...], str]:
    """The sites without which the step is right, and a note if that is not the whole answer.
    ``fails`` says whether the step is wrong when just these of all ``sites`` are rewritten; it is
    called ``max_trials`` times at most."""
    known: dict[frozenset[S], bool] = {}

    def trial(enabled: Sequence[S]) -> bool:
        """``fails``, remembered and counted."""
        key = frozenset(enabled)
        if key not in known:
            if len(known) >= max_trials:
                raise _TrialsSpent
            known[key] = fails(key)
        return known[key]

    blamed: list[S] = []
    suspects = list(dict.fromkeys(sites))
    try:
        if trial([]):
            return (), "the step is wrong with every rewrite left out: the capture is to blame"
        while trial(suspects):
            # Narrowed down in place, so that a stop leaves what the search has reached.
            group = list(suspects)
            try:
                _minimal(group, trial)
            except _TrialsSpent:
                blamed += group if len(group) < len(suspects) else []
                raise
            blamed += group
            suspects = [site for site in suspects if site not in blamed]
    except _TrialsSpent:
        return _ordered(sites, blamed), f"the search stopped after {max_trials} trials"
    if not blamed:
        return (), "the step is right when it is built anew: the failure does not repeat"
    return _ordered(sites, blamed), ""


def _minimal(group: list[S], fails: Callable[[Sequence[S]], bool]) -> None:
    """Shrink a failing ``group`` in place until no part of it can be left out."""
    parts = 2
    while len(group) > 1:
        chunks = _split(group, parts)
        rests = [[s for s in group if s not in chunk] for chunk in chunks] if parts > 2 else []
        if smaller := next(filter(fails, chunks), None):
            parts = 2
        elif smaller := next(filter(fails, rests), None):
            parts = max(parts - 1, 2)
        elif parts >= len(group):
            return
        else:
            parts = min(2 * parts, len(group))
            continue
        group[:] = smaller


def _split(group: Sequence[S], parts: int) -> list[list[S]]:
    bounds = [len(group) * i // parts for i in range(parts + 1)]
    return [list(group[a:b]) for a, b in pairwise(bounds)]


def _ordered(sites: Sequence[S], chosen: Sequence[S]) -> tuple[S, ...]:
    return tuple(site for site in dict.fromkeys(sites) if site in chosen)
