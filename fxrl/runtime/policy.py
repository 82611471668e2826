"""How the trainer's weights get into the engine; which way is said once, and then always taken.

| trainer | engine | way |
| --- | --- | --- |
| full fine-tuning, shared weights | reads the trainer's storages | ``shared``: nothing moves |
| fp32 master weights, or LoRA on them | has them in half precision | ``mirror``: written in place |
| LoRA on shared weights | reads the base's storages | ``fold`` or ``slots``, by cost |
| LoRA, weights not shared | has a copy of the base | ``slots`` if it has any, else ``copy`` |
| full fine-tuning, not shared | has a copy | ``copy``: all weights, at each update |
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from fxrl.runtime.engine import EngineError
from fxrl.runtime.lora_fold import Fold, folded, require_sound
from fxrl.runtime.lora_route import Capabilities, CostModel, Kind, Route, choose
from fxrl.runtime.lora_sites import AdapterError, LoraSite, adapted_layers, lora_sites
from fxrl.runtime.merged_weights import merged_weights, why_not_mergeable
from fxrl.runtime.weights import copy_lora, copy_weights

log = logging.getLogger(__name__)


class Served(Protocol):
    """What a policy needs of its engine."""

    @property
    def takes_adapters(self) -> str:
        """Empty if the engine has LoRA slots, else the reason why not."""
        ...

    def set_adapter(self, sites: tuple[LoraSite, ...]) -> None:
        """Puts the adapter into the engine's slots."""
        ...

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Copies weights by checkpoint names into the engine's own."""
        ...

    def free_device_bytes(self) -> int | None:
        """Left on the GPU while generating; ``None`` is no limit."""
        ...


class Policy:
    """The weights that the engine serves.

    Args:
        engine: the engine's side.
        timings: gets ``"fold"``, ``"restore"``, ``"sync"``, seconds.

    Attributes:
        way: ``"shared"``, ``"mirror"``, ``"fold"``, ``"slots"``, ``"copy"``, or ``"own"`` as long
            as nothing is attached and the engine serves the checkpoint it has loaded.
        reason: why that way.
    """

    def __init__(self, engine: Served, timings: dict[str, float]) -> None:
        self._engine, self._timings = engine, timings
        self._shared: nn.Module | None = None
        self._copied: frozenset[str] = frozenset()
        self._mirrors: dict[str, Tensor] = {}
        self._model: nn.Module | None = None
        self._fold: Fold | None = None
        self._sites: tuple[LoraSite, ...] = ()
        self._stale = False
        self.costs = CostModel()
        self.way: str = "own"
        self.reason = "no model is attached"

    @property
    def uses_slots(self) -> bool:
        """Whether requests have to name the adapter."""
        return self.way == "slots"

    def share(
        self,
        model: nn.Module,
        *,
        copied: Collection[str] = (),
        mirrors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """``model`` is made of the engine's weights; it is what is served unless wrapped.

        Args:
            copied: names of its parameters that have a storage of their own after all.
            mirrors: for some of these, the engine's tensor to write their values into.
        """
        self._shared, self._copied = model, frozenset(copied)
        self._mirrors = dict(mirrors or {})
        self._model = model
        self.way, self.reason = self._full(is_shared=True)
        self._stale = False  # the engine has loaded the same checkpoint

    def attach(
        self,
        model: nn.Module,
        *,
        force: Kind | None,
        decode_steps: float,
        num_sequences: int,
    ) -> None:
        """From now on the engine serves ``model``; see ``VllmEngine.attach``."""
        is_shared = self._shared is not None and any(
            module is self._shared for module in model.modules()
        )
        self._fold, self._sites = None, ()
        has_lora = bool(adapted_layers(model))
        if not has_lora:
            if force in ("fold", "slots"):
                raise EngineError(f"attach: route {force!r} needs a LoRA adapter; it has none")
            self.way, self.reason = self._full(is_shared)
        elif is_shared and force is None and self._is_mirrored(model):
            self.way = "mirror"
            self.reason = "merged into the engine's weights, of which the trainer has its own"
        else:
            route = self._choose(model, is_shared, force, decode_steps, num_sequences)
            self.way, self.reason = route.kind, route.reason
        self._model = model
        self._stale = self.way != "shared"
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

    def _is_mirrored(self, model: nn.Module) -> bool:
        """Whether the merged adapter can be written into the engine's own tensors."""
        return self._adapted(model) <= self._mirrors.keys() and not why_not_mergeable(model)

    def _adapted(self, model: nn.Module) -> set[str]:
        """Names of the weights that an adapter changes."""
        return {f"{site.name}.weight" for site in adapted_layers(model)}

    def _choose(
        self,
        model: nn.Module,
        is_shared: bool,
        force: Kind | None,
        decode_steps: float,
        num_sequences: int,
    ) -> Route:
        no_fold, folded_bytes = "the trainer's base weights are not the engine's", 0
        no_slots, no_copy = self._engine.takes_adapters, why_not_mergeable(model)
        if is_shared:
            no_copy = "copying would overwrite the trainer's base weights"
            apart = sorted(self._adapted(model) & self._copied)
            try:
                self._fold = Fold(model)
                no_fold, folded_bytes = "", self._fold.num_bytes
                if apart:
                    no_fold = f"{len(apart)} adapted weights are not shared ({apart[0]}, ...)"
            except AdapterError as error:
                no_fold = str(error)
        try:
            self._sites = lora_sites(model)
        except AdapterError as error:
            no_slots = no_slots or str(error)
        capabilities = Capabilities(
            no_fold=no_fold,
            no_slots=no_slots,
            no_copy=no_copy,
            folded_bytes=folded_bytes,
            free_device_bytes=self._engine.free_device_bytes(),
        )
        return choose(
            capabilities,
            decode_steps=decode_steps,
            num_sequences=num_sequences,
            costs=self.costs,
            force=force,
        )

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """The time of a ``generate``: the adapter is in the weights or the slots.

        Raises:
            RestoreError: the weights did not come back; the run must end.
        """
        if self._stale:
            self._bring()
        if self.way != "fold":
            yield
            return
        assert self._fold is not None, "the way 'fold' has one"
        with folded(self._fold):
            yield
        self._timings |= self._fold.timings
        place = self._fold.timings.get("fold", 0.0) + self._fold.timings.get("restore", 0.0)
        self.costs.observe(f"fold_{self._fold.backup_place or 'device'}", place)

    def update(self, given: Mapping[str, Tensor] | None, *, lora: bool) -> None:
        """New values: ``given``, or those that the attached model has by now.

        Raises:
            EngineError: nothing is attached and nothing given, or names do not fit.
        """
        start = time.perf_counter()
        what = "update_lora" if lora else "update_weights"
        if self._model is None:
            if given is None:
                raise EngineError(f"{what}: no model is attached, so pass the tensors, or attach()")
            if lora:
                raise EngineError(f"{what}: attach() the model first, the adapter's shape is there")
            self._engine.reload(iter(given.items()))
            self._timings["sync"] = time.perf_counter() - start
            return
        require_sound(self._model)
        if given is not None:
            (copy_lora if lora else copy_weights)(self._model, given)
        if lora and self.way == "shared":
            raise EngineError(f"{what}: the attached model has no LoRA adapter; update_weights()")
        self._stale = self.way != "shared"
        if self._stale:
            self._bring()
        self._timings["sync"] = time.perf_counter() - start

    def _bring(self) -> None:
        """Moves what has to be moved before the next rollout; a fold happens at each rollout."""
        assert self._model is not None, "only an attached model is ever stale"
        if self.way == "slots":
            start = time.perf_counter()
            self._engine.set_adapter(self._sites)
            self.costs.observe("slots", time.perf_counter() - start)
        elif self.way == "copy":
            self._engine.reload(merged_weights(self._model))
        elif self.way == "mirror":
            with torch.no_grad():
                for name, value in merged_weights(self._model):
                    if name in self._mirrors:
                        self._mirrors[name].copy_(value)
        self._stale = False
