"""What a step takes over while it is called, and puts back: hooks and log calls that would cut
the captured graph although they do not touch a number.

Gradient checkpointing switched on by the user brings both: a forward hook that makes the
embeddings require grad, and a logger's warning that the cache is switched off.
"""

from __future__ import annotations

import logging
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn

from fxrl.capture._torch import dynamo_settings
from fxrl.capture.adapters import AdapterBlocks
from fxrl.ir.remark import Remark, RemarkKind, Report

Hook = Callable[..., Any]

LEVELS = ("debug", "info", "warn", "error", "critical", "exception", "log")
"""How the names of log methods begin."""


class Takeover:
    """Scoped changes around each call of a step over ``model``.

    Attributes:
        report: one analysis remark for each thing that was taken over so far.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._quiet: dict[Hook, Hook] = {}
        self._hooked: list[str] = []
        self._silenced = _LogMethods()
        self._blocks = AdapterBlocks(model)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Hooks that only call ``requires_grad_`` rest while traced; log calls are not traced;
        ``disable_adapter`` is."""
        swapped = self._swap_hooks()
        ignored: dict[str, Any] = {"ignore_logging_functions": self._silenced}
        try:
            with dynamo_settings(ignored), self._blocks.traceable():
                yield
        finally:
            for hooks, key, hook in swapped:
                hooks[key] = hook

    @property
    def report(self) -> Report:
        """What was taken over, in words."""
        remarks = []
        if self._hooked:
            reason = "the forward hook's requires_grad_() is not needed in a captured step: skipped"
            remarks.append(_fact(", ".join(self._hooked), reason))
        if self._silenced.met:
            calls = ", ".join(f"{name}()" for name in sorted(self._silenced.met))
            remarks.append(
                _fact("logging", f"log calls are left out of the captured step: {calls}")
            )
        return Report(tuple(remarks))

    def _swap_hooks(self) -> list[tuple[dict[int, Hook], int, Hook]]:
        swapped = [
            (hooks, key, hook)
            for hooks in _forward_hooks(self._model)
            for key, hook in hooks.items()
            if only_requires_grad(hook)
        ]
        if len(swapped) > len(self._hooked):
            found = [hooks for hooks, _, _ in swapped]
            self._hooked += [
                name
                for name, module in self._model.named_modules()
                if name not in self._hooked and any(module._forward_hooks is h for h in found)
            ]
        for hooks, key, hook in swapped:
            # One stand-in for each hook: Dynamo guards on a hook's identity.
            hooks[key] = self._quiet.setdefault(hook, _quiet_while_traced(hook))
        return swapped


def _forward_hooks(model: nn.Module) -> list[dict[int, Hook]]:
    """Those of each module that has any. Asked at every call, while the GPU may have nothing to do,
    of a thousand modules: so with little Python code for each."""
    seen: set[nn.Module | None] = {None}
    level: set[nn.Module | None] = {model}
    while level:
        seen |= level
        level = {part for m in level if m is not None for part in m._modules.values()} - seen
    return [m._forward_hooks for m in seen if m is not None and m._forward_hooks]


def install_collectors(model: nn.Module, failure: Exception) -> bool:
    """Install the hooks that a capture has failed at installing; whether it is worth another try.

    transformers collects hidden states, attentions and router logits in hooks, and installs them
    under a lock at the first call that asks for them. They rest until a call asks again.
    """
    missing = without_collectors(model)
    if not missing:
        return False
    install = sys.modules[_COLLECTORS].maybe_install_capturing_hooks
    if install.__name__ not in "".join(traceback.format_exception(failure)):
        return False
    for one in missing:
        if not hasattr(one, _DONE):  # not by one that holds it
            install(one)
    return True


def without_collectors(model: nn.Module) -> list[nn.Module]:
    """The models of transformers that may yet install such hooks. What holds a model whose hooks
    are there is left alone: it would install those a second time."""
    if _COLLECTORS not in sys.modules:
        return []
    kind = sys.modules["transformers"].PreTrainedModel
    models = [module for module in model.modules() if isinstance(module, kind)]
    return [one for one in models if not any(hasattr(part, _DONE) for part in one.modules())]


_COLLECTORS = "transformers.utils.output_capturing"
_DONE = "_output_capturing_hooks_installed"


def only_requires_grad(hook: Hook) -> bool:
    """Whether all that a hook does is ``output.requires_grad_(...)``, told from its bytecode.

    Training libraries register such a hook on the embeddings so that a checkpointed layer with
    frozen inputs has something that requires grad.
    """
    if not isinstance(hook, types.FunctionType):
        return False
    code = hook.__code__
    plain = not code.co_freevars and not code.co_cellvars and len(code.co_varnames) == 3
    few = set(code.co_consts) <= {None, True, hook.__doc__}
    return plain and few and code.co_names == ("requires_grad_",)


def _quiet_while_traced(hook: Hook) -> Hook:
    """``hook``, skipped in captured code.

    NOTE [Why not taken off altogether]: what a graph break leaves to eager code still needs it,
    or a reentrant checkpoint would silently drop the gradients of what it wraps.
    """

    def quiet(module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        return hook(module, args, output)

    return quiet


class _LogMethods(str):
    """What Dynamo shall leave out: every log method; notes which it met.

    NOTE [Why log calls are left out]: Dynamo ends the graph at each one. Libraries log once, on a
    path that every step takes, so the logits would leave the graph for a line of text.
    NOTE [Why a text]: torch 2.11 writes its settings as JSON, which knows no functions, and logs a
    traceback where it cannot.
    """

    def __new__(cls) -> Self:
        return super().__new__(cls, "all log methods")

    def __init__(self) -> None:
        self._methods = frozenset(_named_as_levels(logging.Logger))
        self.met: set[str] = set()

    def __contains__(self, method: object) -> bool:
        found = method in self._methods
        if found:
            self._meet(method)
        return found

    def __iter__(self) -> Iterator[Any]:
        """The functions that log without a logger. Dynamo stops at the one that it looks for."""
        for function in _named_as_levels(logging):
            try:
                yield function
            except GeneratorExit:
                self._meet(function)
                raise

    def _meet(self, method: object) -> None:
        self.met.add(getattr(method, "__name__", str(method)))

    def __deepcopy__(self, _: object) -> _LogMethods:
        return self  # Dynamo copies its settings; what was met must reach this one


def _named_as_levels(owner: object) -> Iterator[Any]:
    """Log methods of a class or functions of a module, those that libraries add (``warning_once``)
    included."""
    for name, method in vars(owner).items():
        if name.startswith(LEVELS) and callable(method):
            yield method


def _fact(site: str, reason: str) -> Remark:
    return Remark(RemarkKind.ANALYSIS, "capture", site, "", reason)
