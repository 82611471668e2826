"""How the trainer's weights get into the engine; which way is said once, and then always taken.

| trainer | engine | way |
| --- | --- | --- |
| full fine-tuning, shared weights | reads the trainer's storages | ``shared``: nothing moves |
| fp32 master weights, or LoRA on them | has them in half precision | ``mirror``: written in place |
| LoRA | has LoRA slots | ``slots``: A and B are written into them |
| LoRA on shared weights | reads the base's storages | ``fold``: W + s B A while it generates |
| LoRA, weights not shared | has a copy of the base | ``copy``: merged weights, at each update |
| full fine-tuning, not shared | has a copy | ``copy``: all weights, at each update |

NOTE [Why slots win where there are any]
A fold costs 15 ms a rollout at Qwen3-1.7B, vLLM's LoRA kernels 1.2 ms a decode step (one H200, vLLM
0.25.1, rank 32): beyond a dozen steps a fold is cheaper. So an engine has no slots unless its user
asked for them (``max_lora_rank``), and who asked for them gets them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from fxrl.engines.engine import EngineError
from fxrl.engines.weights.lora.fold import Fold, folded, require_sound
from fxrl.engines.weights.lora.sites import (
    AdapterError,
    LoraSite,
    Merge,
    adapted_layers,
    check_storages,
    lora_sites,
    merged_weights,
    why_lost,
    why_not_mergeable,
)
from fxrl.ops.dithered import dithered, seed_of

if TYPE_CHECKING:
    from fxrl.engines.vllm.handle import VllmHandle

log = logging.getLogger(__name__)

Route = Literal["slots", "fold", "copy"]
"""An adapter's ways, the first possible one is taken."""


class RouteError(EngineError):
    """The LoRA route that was asked for is not possible here, or none is."""


class WeightSync:
    """Hands the trainer's weights over to one engine; ``timings`` gets the seconds of ``"fold"``,
    ``"restore"`` and ``"sync"``."""

    def __init__(self, engine: VllmHandle, timings: dict[str, float]) -> None:
        self._engine, self._timings = engine, timings
        self._shared: nn.Module | None = None
        self._copied: frozenset[str] = frozenset()
        self._mirrors: dict[str, Tensor] = {}
        self._model: nn.Module | None = None
        self._fold: Fold | None = None
        self._sites: tuple[LoraSite, ...] = ()
        self._unsent: nn.Module | None = None  # whose values the engine has not got yet
        # "shared", "mirror", "fold", "slots" (requests must name the adapter), "copy", or "own"
        # while nothing is attached: the engine then serves the checkpoint that it has loaded.
        self.way: str = "own"
        self.reason = "no model is attached"

    def share(
        self,
        model: nn.Module,
        *,
        copied: Collection[str] = (),
        mirrors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``model`` is made of the engine's weights, and is what the engine serves until another is
        attached. Its parameters ``copied`` have storages of their own; ``mirrors`` are, for some of
        these, the engine's tensors to write their values into."""
        self._shared, self._copied = model, frozenset(copied)
        self._mirrors = dict(mirrors or {})
        self._model, self._fold, self._sites = model, None, ()
        self.way, self.reason = self._full(is_shared=True)
        self._unsent = None  # the engine has loaded the same checkpoint

    def attach(self, model: nn.Module, *, route: Route | None = None) -> None:
        """From now on the engine serves ``model``; see ``VllmEngine.attach``."""
        is_shared = self._shared is not None and any(
            module is self._shared for module in model.modules()
        )
        if route not in (None, *get_args(Route)):
            raise RouteError(f"lora route {route!r} is unknown; use one of {get_args(Route)}")
        if not adapted_layers(model):
            if route in ("fold", "slots"):
                raise RouteError(f"attach: route {route!r} needs a LoRA adapter; it has none")
            self.way, self.reason = self._full(is_shared)
        elif (
            is_shared
            and route is None
            and self._adapted(model).keys() <= self._mirrors.keys()
            and not why_not_mergeable(model)
        ):
            self.way = "mirror"
            self.reason = "merged into the engine's weights, of which the trainer has its own"
        else:
            self.way, self.reason = self._lora(model, is_shared, route)
        self._fold = Fold(model) if self.way == "fold" else None
        self._sites = lora_sites(model) if self.way == "slots" else ()
        self._model = self._unsent = model
        log.info("rollouts take the trainer's weights by %r: %s", self.way, self.reason)

    def _full(self, is_shared: bool) -> tuple[str, str]:
        """(way, reason) of a model without an adapter."""
        if not is_shared:
            return "copy", "the trainer has weights of its own; all are copied at each update"
        if not self._copied:
            return "shared", "the trainer's parameters are views of the engine's"
        count, apart = len(self._copied), sorted(self._copied - self._mirrors.keys())
        if not apart:
            return "mirror", f"{count} parameters are written into the engine's at each update"
        return "copy", (
            f"{len(apart)} parameters could not be shared ({apart[0]}, ...); all are copied at "
            "each update"
        )

    def _lora(self, model: nn.Module, is_shared: bool, asked: Route | None) -> tuple[str, str]:
        """(way, reason) of a model with an adapter: what was asked for, or the first possible."""
        copying = "copying would overwrite the trainer's base weights"
        why_not: dict[Route, str] = {
            "slots": self._engine.takes_adapters or _why_not(lambda: lora_sites(model)),
            "fold": self._why_no_fold(model, is_shared),
            "copy": copying if is_shared else why_not_mergeable(model),
        }
        possible = [route for route, why in why_not.items() if not why]
        if asked is not None:
            if asked not in possible:
                others = f"possible: {', '.join(possible)}" if possible else "nor is any other"
                raise RouteError(
                    f"lora route {asked!r} is not possible here: {why_not[asked]}; {others}"
                )
            return asked, "asked for"
        passed = [f"{route}: {why}" for route, why in takewhile(itemgetter(1), why_not.items())]
        if not possible:
            raise RouteError(f"lora: no way to give the adapter to the engine; {'; '.join(passed)}")
        return possible[0], "; ".join(
            passed
        ) or "the engine was built with LoRA slots (max_lora_rank)"

    def _why_no_fold(self, model: nn.Module, is_shared: bool) -> str:
        if not is_shared:
            return "the trainer's base weights are not the engine's"
        if why := _why_not(lambda: check_storages(model, lora_sites(model))):
            return why
        merges = {site.name: Merge.of(site) for site in lora_sites(model)}
        if why := why_lost(merges, zero_too=True):
            return why
        apart = sorted(self._adapted(model).keys() & self._copied)
        return f"{len(apart)} adapted weights are not shared ({apart[0]}, ...)" if apart else ""

    def _adapted(self, model: nn.Module) -> dict[str, LoraSite]:
        """Where an adapter changes a weight, by the weight's name."""
        return {f"{site.name}.weight": site for site in adapted_layers(model)}

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Around a ``generate``: the adapter is in the weights or the slots. A ``RestoreError``, if
        the weights did not come back, must end the run."""
        self._bring()
        if self._fold is None:
            yield
            return
        with folded(self._fold):
            yield
        self._timings |= self._fold.timings

    def update(self, *, lora: bool) -> None:
        """New values: those that the attached model has by now."""
        start = time.perf_counter()
        what = "update_lora" if lora else "update_weights"
        if self._model is None:
            raise EngineError(f"{what}: no model is attached; attach() the trainer's first")
        require_sound(self._model)
        if lora and self.way == "shared":
            raise EngineError(f"{what}: the attached model has no LoRA adapter; update_weights()")
        self._unsent = self._model
        self._bring()
        self._timings["sync"] = time.perf_counter() - start

    def _bring(self) -> None:
        """Moves what has to be moved before the next rollout; a fold happens at each rollout."""
        if self._unsent is None:
            return
        if self.way == "slots":
            self._engine.set_adapter(self._sites)
        elif self.way == "copy":
            self._engine.reload(merged_weights(self._unsent))
        elif self.way == "mirror":
            self._write_mirrors(self._unsent)
        self._unsent = None

    @torch.no_grad()
    def _write_mirrors(self, model: nn.Module) -> None:
        """Rounds the model's values into the engine's tensors.

        NOTE [Why by chance what an adapter adds, alone]: fp32 weights are multiplied by under
        autocast, which rounds them to the nearest, so that these are the trainer's own bit for bit.
        Rounded by chance, all of them would be others: the drift of 20 steps of SmolLM2 was 0.41
        nat instead of 0.046 (bench/results/drift_rounding_smollm2_h200.json). What an adapter adds
        is rounded nowhere in the trainer; see ``ops.dithered``.
        """
        adapted = self._adapted(model)
        for name, value in merged_weights(model):
            if (mirror := self._mirrors.get(name)) is None:
                continue
            if name in adapted:
                base = adapted[name].weight
                wanted = base.to(mirror.dtype) + (value - base)
                value = dithered(wanted, mirror.dtype, seed_of(name))
            mirror.copy_(value)


def _why_not(check: Callable[[], object]) -> str:
    """The reason why ``check`` refuses the adapter; empty if it does not."""
    try:
        check()
    except AdapterError as error:
        return str(error)
    return ""
