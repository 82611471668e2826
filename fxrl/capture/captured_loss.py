"""A loss under ``torch.compile``: captured in the first way that works, else run as written.

NOTE [Why one at a time]: Dynamo's settings and the hooks of a model belong to the process, not to a
thread. What a step changes of them holds for its call and is put back; two calls at once would put
back each other's values, and trace under them. So one thread runs at a time; backwards run freely.
"""

from __future__ import annotations

import inspect
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import cached_property, partial
from traceback import FrameSummary
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from fxrl.capture._dynamo import plain_python_is_traced
from fxrl.capture._dynamo.behind import as_written_behind
from fxrl.capture._torch import (
    COMPILES,
    DYNAMO_LOG,
    STEP,
    GuardOnDataDependentSymNode,
    TooOftenError,
    TorchDynamoException,
    Variation,
    cache_entries,
    compile_counters,
    compiles_undisturbed,
    dynamo_settings,
    forget_inputs,
    functorch_level,
    global_hooks,
    in_checkpoint,
    in_dispatch_mode,
    keeps_by_op,
    leave_transforms,
    made_by_dynamo,
    method_replaced,
    outside_of_checkpoint,
    reset_code,
    try_again,
    why_anew,
)
from fxrl.capture.branches import Branches, CannotBeginAnewError, random_state
from fxrl.capture.breaks import (
    break_remarks,
    breaks_inside,
    in_one_line,
    place_of,
    without_breaks,
)
from fxrl.capture.checks import CheckFailedError
from fxrl.capture.dynamic import mark_batch, mark_inside, sizes_of
from fxrl.capture.gradient_hooks import hung
from fxrl.capture.held_models import models_held, names_held
from fxrl.capture.repeated import RepeatedLayers
from fxrl.capture.retries import Wait, may_pass
from fxrl.capture.scoped_hooks import Takeover, install_collectors, without_collectors
from fxrl.errors import FxrlError
from fxrl.ir.capture_record import plan_of
from fxrl.ir.on_miss import illegal_misses, open_misses
from fxrl.ir.plan import TileHead
from fxrl.ir.remark import Refusal, Remark, RemarkKind, Report
from fxrl.ir.source import source_of_trace
from fxrl.scoped import swapped

_SETTINGS: dict[str, Any] = {
    "recompile_limit": 64,  # code shared by many models, such as a library's forward
    "fail_on_recompile_limit_hit": True,  # never run eager in silence
    "skip_nnmodule_hook_guards": False,  # hooks that come or go later are honoured
    "skip_tensor_guards_with_matching_dict_tags": False,  # requires_grad_() leaves a module's dicts
    "allow_rnn": True,  # the graph ends at its call, not with the function that has one
    "use_numpy_random_stream": True,  # NumPy's own numbers, at which the graph ends; not torch's
    "use_lamba_guard_for_object_aliasing": True,  # torch 2.15 would not ask ``a is not b`` else
}
#: With sizes that vary a found entry is dearer than the op, of constants it is cheaper.
_CACHE = "fake_tensor_cache_enabled"
_DATA = ("capture_scalar_outputs", "capture_dynamic_output_shape_ops")
#: A break in a helper ends the graph there, not where it is called. Where no graph may end Dynamo
#: would all the same ask every function on the stack, at every line of it: 0.2 s.
_INSIDE = "nested_graph_breaks"
#: The ways to capture, in the order in which they are tried: equal layers once; every layer; and
#: the graph ended where numbers are read off tensors. In the others such a number is a symbol of
#: the graph, such as the count of rows that a mask selects; Python may decide by it all the same.
_WAYS = tuple(
    _SETTINGS | {_INSIDE: ends} | dict.fromkeys(_DATA, read)
    for ends, read in ((False, True), (True, True), (True, False))
)
_LAYERS_ONCE, _WHOLE, _IN_PARTS, _AS_WRITTEN = range(4)
_OFTEN = 8  # captures of a loss: more than it has kinds of batches and branches, mostly
_ANEW_CURE = (
    "write Python's loops over tokens with tensor ops, compute what it reads in texts of the batch "
    "ahead of the step, or pad batches to a few sizes"
)
_FOLLOWED = "a branch on a tensor's value is captured the way that it goes"
_GRAPH = "<eval_with_key>"  # how torch.fx names the file that a graph's code would be in
_ONE_AT_A_TIME = threading.RLock()


class Backend(Protocol):
    """What is asked of a backend: the graphs that it was given, each with its remarks."""

    captures: list[Any]
    only_explain: bool
    alone: bool  # whether what is captured now is one of many calls, each of a part of the step
    model: nn.Module | None  # whose modules' names its sites have
    held: Mapping[str, str]  # the names of what the loss function holds (``names_held``)

    def __call__(self, gm: Any, example_inputs: Any) -> Callable[..., Any]: ...


class CapturedLoss:
    """``loss_fn(model, batch)``, captured for ``backend`` at the first batch of each kind.

    NOTE [Why Dynamo is told of the end]: it keeps every backend, and what was compiled of code that
    nobody can call any more. Captures hold weights, so those of a step that is gone would stay.

    Attributes:
        compiled: what ``torch.compile`` made, by the global hooks in force and the way to capture.
        losses: what was lost outside of any captured graph: breaks without a graph, failures.
    """

    def __init__(self, model: nn.Module, loss_fn: Callable[..., Any], backend: Backend) -> None:
        self._model, self._loss_fn = model, loss_fn
        self._backend = backend
        backend.model, backend.held = model, names_held(loss_fn)
        found = weakref.ref(backend)

        def weak_backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            alive = found()
            assert alive is not None, "only a call of the step compiles"
            return alive(gm, inputs)

        self._weak_backend = weak_backend
        self.compiled: dict[Any, Callable[[Any], Any]] = {}
        self._parts: dict[Any, Callable[..., Any]] = {}  # captured by themselves, likewise
        # Of the kinds of batches that the first way failed at, and until when.
        self._way: dict[Any, tuple[int, Wait]] = {}
        # By kind of batches the functions behind a break that failed, likewise.
        self._behind: dict[Any, dict[types.CodeType, Wait]] = {}
        self._takeover = Takeover(model)
        self._repeated = RepeatedLayers(model, partial(models_held, loss_fn))
        self._variation = Variation()
        self._branches = tuple(Branches() for _ in _WAYS)
        self.losses = Report()
        self._varies = True  # a size of the batch
        self._full = False  # something was captured as often as it may be

    @property
    def report(self) -> Report:
        """What was taken over, what was lost, and every remark of the captured graphs."""
        captured = tuple(r for one in self._backend.captures for r in one.report.remarks)
        waits = [wait for _, wait in self._way.values()]
        waits += [wait for found in self._behind.values() for wait in found.values()]
        past = {wait.told for wait in waits} - {one.told for one in waits if not one.is_over}
        losses = Report.of(said for said in self.losses.remarks if said not in past)
        return self._takeover.report + losses + Report(captured)

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """All that ``torch.compile`` made."""
        return [*self.compiled.values(), *self._parts.values()]

    def __call__(self, batch: Any) -> Any:
        """What the loss returns."""
        with _ONE_AT_A_TIME, self._takeover.active():
            self._varies = mark_batch(batch)
            if (refused := _never_captured()) is not None:
                self._note(RemarkKind.MISSED, "", *refused)
                result = self._loss_fn(self._model, batch)
            else:
                result = self._first_that_works(batch)
        if not any(map(_holds_a_tensor, pytree.tree_leaves(result))):
            raise FxrlError(
                f"the loss function returned {result!r}, which holds no tensor; "
                'return the loss, or (loss, {"name": tensor})'
            )
        return result

    def _first_that_works(self, batch: Any) -> Any:
        way = first = self._first_way(batch)
        failure: Exception | None = None
        ran = passes = False
        begin_anew = random_state()
        while way < _AS_WRITTEN:
            try:
                result = self._run(way, batch)
                break
            except _CaptureFailedError as failed:
                begin_anew()  # what comes ahead of the part that failed may have drawn
                if install_collectors(self._model, failed.error):
                    self.__dict__.pop("_may_install", None)
                    way = first = self._first_way(batch)
                    continue
                failure, passes, ran = failed.error, failed.passes, ran or failed.ran
                if _too_often(failure):  # what was captured runs on, for the batches that it fits
                    return self._as_written_beside(failure, batch)
                # It is tried again, where another way may succeed and be kept although it is worse.
                way = _AS_WRITTEN if passes else self._next_way(way, failure)
            except CannotBeginAnewError:
                begin_anew()
                for branches in self._branches[way:]:
                    branches.leave()
                way = max(way, _WHOLE)  # layers once are one graph, and now it ends at the branch
            except CheckFailedError as failed:
                begin_anew()
                if failed.branch is not None:
                    self._branches[way].turn(failed.branch, failed.found)
                    continue
                return self._as_written_after(failed, batch)
        else:
            if failure is not None and self._backend.only_explain:
                raise failure
            # raises what the user's code raises, from its own line
            result = self._loss_fn(self._model, batch)
        if way != first:
            told = None if failure is None else self._note_failure(failure, way, ran=ran)
            _, wait = self._way.get(kind := _kind(batch), (way, Wait()))
            wait.begin(told, for_ever=not passes)
            self._way[kind] = way, wait
            # It has this frame and the callers', whose losses would wait for the collector.
            del failure
        return result

    def _as_written_after(self, failed: CheckFailedError, batch: Any) -> Any:
        """The call as the loss is written: its own error if it lets one out, else a miss."""
        result = self._loss_fn(self._model, batch)
        reason = "a check failed, and the loss goes on: a call like this is run as written"
        if any(one.graph_breaks for one in self._backend.captures):
            reason += "; what graphs that end ahead of the check write is written twice"
        cure = "leave such batches out, those with empty sequences too, or do without the check"
        self._note(RemarkKind.MISSED, failed.source, reason, cure)
        return result

    def _as_written_beside(self, failure: Exception, batch: Any) -> Any:
        """The call as the loss is written, where it may be captured no more; told once."""
        if self._backend.only_explain:
            raise failure
        if not self._full:
            self._note_failure(failure, _AS_WRITTEN)
        self._full = True
        return self._loss_fn(self._model, batch)

    def _first_way(self, batch: Any) -> int:
        known = self._way.get(_kind(batch)) if self._way else None
        if known is not None and not known[1].is_over_now():
            return known[0]
        self._repeated.refresh()
        # Nothing breaks in one graph, nor are hooks installed that only its failure tells of.
        return _LAYERS_ONCE if self._repeated or self._may_install else _WHOLE

    def _next_way(self, way: int, failure: Exception) -> int:
        """The way to try where one has failed."""
        of_data, branches = _decided_by_data(failure), self._branches[way]
        if way == _WHOLE and not of_data and branches.any_followed:
            # Only the way that a branch was taken for likely to go may hold what fails, such as a
            # split of another count of rows: Python is asked at branches then.
            branches.leave()
            return way
        if way == _IN_PARTS or (way == _WHOLE and not of_data):
            return _AS_WRITTEN
        self._branches[way + 1].learn(branches)
        return way + 1

    @cached_property
    def _may_install(self) -> bool:
        """Whether the model may install hooks; looking takes 17 ms of 36 layers."""
        return bool(without_collectors(self._model))

    def _run(self, way: int, batch: Any) -> Any:
        """The captured loss. Raises ``_CaptureFailedError`` if a compilation failed, or the first
        run of its result."""
        once = way == _LAYERS_ONCE
        generation = self._repeated.generation if once else 0
        branches = self._branches[way]
        key = self._key = global_hooks(), way, generation, branches.variant
        if new := key not in self.compiled:
            self.compiled[key] = self._compile(once)
        code = inspect.unwrap(self.compiled[key]).__code__
        captures, skipped = self._backend.captures, _skipped()
        before = len(captures)
        layers = self._repeated.traced() if once else nullcontext()
        # It would say at each call that no more is captured.
        log = swapped(DYNAMO_LOG, disabled=True) if self._full else nullcontext()
        known = self._behind.get(_kind(batch), {}) if self._behind else {}
        behind = [one for one, wait in known.items() if not wait.is_over_now()]

        def mark(given: Mapping[str, Any]) -> None:  # what goes on behind a break has its sizes
            mark_inside(sizes_of(batch), given)

        with (
            dynamo_settings(_WAYS[way] | {_CACHE: not self._varies}),
            self._variation.accounted(),
            layers,
            plain_python_is_traced(code, branches),
            compiles_undisturbed() as compilations,
            breaks_inside() as breaks,
            as_written_behind(code, behind, mark, self._is_raised, _settings_behind) as lost,
            log,
        ):
            try:
                result = hung(self.compiled[key], batch)
            except CheckFailedError as failed:
                if new and failed.branch is not None:  # it has never run to its end
                    del captures[before:], self.compiled[key]
                raise
            except Exception as error:  # a graph can hold anything that PyTorch can
                leave_transforms()
                if _skipped() > skipped:  # of a batch that is none, but the next one may be
                    try_again(code)
                if self._is_the_losss(error, bool(compilations)):
                    raise
                raise self._failed(error, before, behind=bool(lost)) from None
        for one in captures[before:]:
            forget_inputs(one.dynamo)
        self._leave_behind(lost, batch)
        self._note_often(code, captures[before:])
        self._note_branches(branches, {found.source for found in breaks})
        # What is left out behind a break, such as a further turn of a branch, is not the loss.
        left_out = _skipped() > skipped and not cache_entries(code)
        if breaks:
            self._note_breaks(breaks, captures, before)
        elif left_out and not any(one.report.remarks for one in captures[before:]):
            self._note_skipped()
        return result

    def _is_the_losss(self, error: Exception, compiled: bool) -> bool:
        """Whether what a call has raised is the loss's own, and no matter of its capture."""
        if isinstance(_cause(error), FxrlError):
            return False
        tried = compiled and not self._backend.only_explain
        outside = not (tried or _while_compiling(error))
        return outside or isinstance(error, torch.OutOfMemoryError)

    def _failed(self, error: Exception, before: int, *, behind: bool) -> Exception:
        """What is raised for an error of a capture; nothing here holds it, as it has all frames."""
        if isinstance(_cause(error), FxrlError):
            return _cause(error)  # its text is all that a user needs
        capturing = _while_compiling(error)
        # Code of the user's between two graphs may do better next time, which then run again.
        passes = may_pass(error) or not (capturing or _in_captured_code(error))
        if not passes:
            del self._backend.captures[before:]
        if isinstance(_cause(error), CannotBeginAnewError):
            return _cause(error)
        return _CaptureFailedError(error, ran=behind or not capturing, passes=passes)

    def _is_raised(self, failure: Exception) -> bool:
        """Whether the call ends where a function behind a break fails so; a refusal is of all."""
        refused = isinstance(failure.__cause__ or failure.__context__, Refusal)
        return refused or self._backend.only_explain or isinstance(_cause(failure), FxrlError)

    def _leave_behind(self, failed: list[Any], batch: Any) -> None:
        """Functions behind a break run as they are written from now on, as they did in this call,
        with batches of this kind."""
        while failed:
            code, failure = failed.pop(0)
            self._full |= _too_often(failure)
            told = self._note_failure(failure, _AS_WRITTEN, behind=True)
            wait = self._behind.setdefault(_kind(batch), {}).setdefault(code, Wait())
            wait.begin(told, for_ever=not may_pass(failure))

    def _compile(self, once: bool) -> Callable[[Any], Any]:
        for reason in self._repeated.apart:
            self._note(RemarkKind.ANALYSIS, "", reason)
        model, loss_fn = self._model, self._loss_fn
        return self._compiled(lambda batch: loss_fn(model, batch), STEP, whole=once)

    def alone(self, function: Callable[..., Any], *args: Any) -> Any:
        """What a function returns that the step calls from where nothing is captured, captured by
        itself. A checkpoint around it is taken over: its second run would come with the backward,
        when no step is at hand, and had to save the same."""
        if keeps_by_op():
            reason = "a module that FSDP gathers runs as written: a checkpoint sees each of its ops"
            cure = "let it keep what the module is given, without a context_fn"
            self._note(RemarkKind.ANALYSIS, "", reason, cure)
            return function(*args)
        checkpointed = in_checkpoint()
        key = function, checkpointed, self._key
        if key not in self._parts:
            part = _checkpointed(function) if checkpointed else function
            self._parts[key] = self._compiled(part, function.__name__)
        with swapped(self._backend, alone=True), ExitStack() as stack:
            if checkpointed:
                stack.enter_context(outside_of_checkpoint())
            return self._parts[key](*args)

    def _compiled(
        self, function: Callable[..., Any], name: str, *, whole: bool = False
    ) -> Callable[..., Any]:
        fresh = _fresh(function, name)
        compiled = torch.compile(fresh, backend=self._weak_backend, fullgraph=whole)
        weakref.finalize(self, reset_code, fresh.__code__).atexit = False
        return compiled

    def _note_often(self, code: types.CodeType, new: Sequence[Any]) -> None:
        """What the loss is captured for again and again, told once."""
        if new and len(cache_entries(code)) == _OFTEN:
            reason = f"captured {_OFTEN} times, which takes seconds each; now for {why_anew()}"
            self._note(RemarkKind.ANALYSIS, place_of(self._own_place())[0], reason, _ANEW_CURE)

    def _note_branches(self, branches: Branches, ended: Container[str]) -> None:
        """The branches that were met and followed; where a graph ends by now its break tells."""
        self.losses = Report.of(
            said
            for said in self.losses.remarks
            if not (said.reason.startswith(_FOLLOWED) and said.source in ended)
        )
        for source, code in map(place_of, branches.met):
            if source not in ended:
                self._note(RemarkKind.ANALYSIS, source, f"{_FOLLOWED}: {code}")
        branches.met.clear()

    def _note_breaks(self, breaks: list[Any], captures: Sequence[Any], before: int) -> None:
        """Breaks of a call; facts where every loss head was found all the same, and rewritten if
        that pays. Where none was, it may be in what ran as written behind a break, so one that a
        graph told as a fact, since it found no head, is a miss instead."""
        new = captures[before:]
        report = Report(tuple(r for capture in new for r in capture.report.remarks))
        plan = plan_of(captures)
        lost = illegal_misses(report, plan)
        rewritten = any(isinstance(choice, TileHead) for choice in plan.choices.values())
        kept = not lost and (rewritten or bool(open_misses(report)))
        missed = {r.source for r in report.of_kind(RemarkKind.MISSED) if r.pass_name == "capture"}
        told = {found.source for one in new for found in one.graph_breaks} if kept else missed
        untold = [found for found in breaks if found.source not in told]
        for capture in () if kept else new:
            capture.remarks = without_breaks(capture.remarks, {found.source for found in untold})
        self.losses += break_remarks(
            untold, "loss", RemarkKind.ANALYSIS if kept else RemarkKind.MISSED
        )

    def _note_skipped(self) -> None:
        """The loss was left out, and Dynamo does not say why: so torch 2.15 does at gradients that
        are taken inside of it. What it calls may be graphs, of which there is nothing to say."""
        reason = "not captured: Dynamo left the function out, and gives no reason"
        cure = "take gradients outside of it; or find the call that it skips by leaving calls out"
        self._note(RemarkKind.MISSED, place_of(self._own_place())[0], reason, cure)

    def _own_place(self) -> list[FrameSummary]:
        """File and line at which the loss function begins."""
        code = getattr(inspect.unwrap(self._loss_fn), "__code__", None)
        return [FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)] if code else []

    def _note_failure(
        self, failure: Exception, way: int, *, behind: bool = False, ran: bool = False
    ) -> Remark | None:
        source, code = place_of(getattr(failure, "real_stack", None) or ())
        source = source or source_of_trace(str(failure)) or place_of(self._own_place())[0]
        cause = _cause(failure)
        why = in_one_line(str(cause))
        what = f"{type(cause).__name__}: {why}"
        if often := _too_often(failure):
            what = why = f"captured {_WAYS[0]['recompile_limit']} times, and now for {why_anew()}"
        what += f", in {code}" if code else ""
        # Dynamo raises one of its own for a refusal of what it traces, which is then the context.
        refused = failure.__cause__ or failure.__context__
        what, cure = (refused.reason, refused.cure) if isinstance(refused, Refusal) else (what, "")
        cure = _ANEW_CURE if often else cure
        if way == _WHOLE:
            reason = f"equal layers are captured one by one, which takes longer ({why})"
            return self._note(RemarkKind.ANALYSIS, source, reason) if self._repeated else None
        if way < _AS_WRITTEN:
            reason = f"captured in parts, which end where numbers are read off tensors ({what})"
            return self._note(RemarkKind.ANALYSIS, source, reason)
        which = "what goes on behind a break is " if behind else ""
        again = "; what is ahead of it ran twice in that call" if ran else ""
        reason = f"{which}not captured, run as written ({what}){again}"
        return self._note(RemarkKind.MISSED, source, reason, cure)

    def _note(self, kind: RemarkKind, source: str, reason: str, cure: str = "") -> Remark:
        remark = Remark(kind, "capture", "loss", source, reason, cure)
        if remark not in self.losses.remarks:
            self.losses += Report((remark,))
        return remark


def _never_captured() -> tuple[str, str] | None:
    """Why nothing can be captured now, and a cure."""
    if functorch_level() is not None:
        why = "nothing is captured inside torch.func's transforms"
        return why, "call torch.func inside the loss function"
    if in_dispatch_mode():
        why = "a TorchDispatchMode, such as a counter of FLOPs, sees each op: nothing is captured"
        return why, "leave the mode ahead of the step"
    if (name := method_replaced()) is not None:  # fxrl's own code would call it, too
        why = f"torch.Tensor.{name} is not torch's own: nothing is captured"
        return why, "put torch's back, and call a function instead"
    return None


def _holds_a_tensor(leaf: Any) -> bool:
    """Whether it is one, or an object with one, such as a dataclass of a loss and its metrics."""
    return any(isinstance(one, Tensor) for one in (leaf, *getattr(leaf, "__dict__", {}).values()))


class _CaptureFailedError(Exception):
    """A compilation has failed, or the first run of its result.

    Attributes:
        ran: what is ahead of the failure has run, and will again where the call begins anew.
        passes: a later call may do better.
    """

    def __init__(self, error: Exception, *, ran: bool, passes: bool) -> None:
        super().__init__()
        self.error, self.ran, self.passes = error, ran, passes


def _skipped() -> int:
    """How many functions Dynamo has tried to capture so far, and given no code for."""
    tried = compile_counters["frames"]
    return int(tried["total"]) - int(tried["ok"])


def _while_compiling(error: Exception) -> bool:
    """Whether Dynamo raised it, or let it through: some kinds it does not wrap."""
    known = isinstance(error, (TorchDynamoException, GuardOnDataDependentSymNode))
    frames = traceback.walk_tb(error.__traceback__)
    return known or any(frame.f_globals.get("__name__") == COMPILES for frame, _ in frames)


def _in_captured_code(error: Exception) -> bool:
    """Whether a graph raised it, or code that Dynamo made around one: no code of the user's."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_graph = any(code.co_filename.startswith(_GRAPH) for code in codes)
    return of_graph or any(code in made_by_dynamo for code in codes[-1:])


def _cause(error: Exception) -> Exception:
    """What was raised inside of a backend, which Dynamo tells as ``backend=... raised:``."""
    cause: Exception = getattr(error, "inner_exception", error)
    return cause


def _too_often(error: Exception) -> bool:
    return isinstance(_cause(error), TooOftenError)


def _decided_by_data(error: Exception) -> bool:
    text = str(error).lower()
    counted = "data-dependent" in text or "unbacked symbol" in text  # a count that a body keeps
    return counted or isinstance(error, GuardOnDataDependentSymNode)


def _settings_behind(failure: Exception) -> Mapping[str, Any] | None:
    """Those to capture a function behind a break with that has failed so."""
    return _WAYS[_IN_PARTS] if _decided_by_data(failure) else None


def _kind(batch: Any) -> Any:
    """What Dynamo captures anew for: structure, dtypes, dims, sizes 0 and 1, grad mode."""
    leaves, spec = pytree.tree_flatten(batch)
    parts = [
        (leaf.dtype, *(min(size, 2) for size in leaf.shape))
        if isinstance(leaf, Tensor)
        else type(leaf)
        for leaf in leaves
    ]
    return str(spec), str(parts), torch.is_grad_enabled()


def _checkpointed(function: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a module (``function(self, args, kwargs)``) that keeps only what it is given."""

    def again(self: Any, args: Any, kwargs: Any) -> Any:
        return checkpoint(lambda *given: function(self, given, kwargs), *args, use_reentrant=False)

    return again


def _fresh(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function to capture, with a code object of its own.

    NOTE [Why a fresh code object]: Dynamo keeps compiled code per code object. Steps that shared
    one would share a recompile limit and run past it into eager mode.
    """
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, None, function.__closure__)
