"""The trainer's LoRA factors, copied on the device into vLLM's stacked adapter slots.

vLLM keeps, per adapted layer, ``lora_a_stacked[i]`` [slots, 1, max rank, in] and
``lora_b_stacked[i]`` [slots, 1, out_i, max rank], one i for each part of a fused layer (q, k, v;
gate, up); the scaling lies in B. Its own way there is by files, or by a model object built anew
for each version. Here the adapter is activated once by vLLM's own means, so that an id stands for a
slot, and from then on only bytes are copied: no disk, no allocation, addresses unchanged (CUDA
graphs stay valid), nothing of the trainer aliased.

After a write the engine must drop its prefix cache: cached keys and values are of the old adapter.
Works on objects it is handed; which attributes they need is said by ``SlotManager``.

NOTE [How vLLM gets an adapter without a file]
vLLM's requests name an adapter by a path and its loader reads that. But the worker loads nothing
for an adapter that its manager already has, so the adapter is handed to the manager under the id
that the requests carry. That takes one private attribute of vLLM
(``WorkerLoRAManager._adapter_manager``), checked here and by a contract test. Scaling is multiplied
into B beforehand (vLLM would multiply it in place, into whatever tensor it was given) and adapters
that are active together become one of the summed rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fxrl.engines.engine import EngineError
from fxrl.engines.weights.lora.sites import PEFT_PREFIX, LoraSite

log = logging.getLogger(__name__)

ADAPTER_ID = 1
ADAPTER_NAME = "fxrl-policy"


def adapter_manager(worker: Any) -> Any:
    """vLLM's ``LoRAModelManager``.

    Raises:
        EngineError: this version of vLLM keeps it somewhere else.
    """
    manager = getattr(worker.model_runner, "lora_manager", None)
    inner = getattr(manager, "_adapter_manager", None)
    wanted = ("add_adapter", "remove_adapter", "activate_adapter", "lora_config")
    lacking = [name for name in wanted if not hasattr(inner, name)]
    if lacking:
        raise EngineError(
            f"this vLLM's LoRA manager lacks {', '.join(lacking)} at model_runner.lora_manager."
            "_adapter_manager; train with folded adapters (max_lora_rank=None), or use a "
            "tested version: 0.25.1, 0.32.0"
        )
    return inner


class Adapter:
    """The trainer's adapter in vLLM's slots.

    The first time vLLM itself loads it, so that an id stands for a slot; from then on the factors
    are copied into that slot (``lora_slots``), or loaded anew where that does not fit the layers.

    Args:
        worker: vLLM's.
        sites: the trainer's modules.
        lora_model, peft_helper: vLLM's classes ``LoRAModel`` and ``PEFTHelper``.

    Raises:
        EngineError: vLLM takes no LoRA at some module, or the rank is above ``max_lora_rank``.
    """

    def __init__(
        self, worker: Any, sites: Sequence[LoraSite], *, lora_model: Any, peft_helper: Any
    ) -> None:
        self._manager, self._device = adapter_manager(worker), str(worker.device)
        self._sites, self._lora_model, self._peft_helper = sites, lora_model, peft_helper
        self._mapper = _renames(self._manager.model)
        self._load()
        self._writer = self._slot_writer()
        if self._writer is not None:
            self._writer.write()

    def refresh(self) -> None:
        """Takes the factors as they are now."""
        active = ADAPTER_ID in getattr(self._manager, "lora_index_to_id", ())
        if self._writer is None or not active:  # vLLM drops adapters when weights are reloaded
            self._load()
        if self._writer is not None:
            self._writer.write()

    def _slot_writer(self) -> SlotWriter | None:
        rename = getattr(self._mapper, "_map_name", None)
        named = {} if rename is None else {"rename": lambda name: rename(name) or name}
        try:
            return SlotWriter(self._manager, self._sites, ADAPTER_ID, **named)
        except SlotError as error:
            log.warning("%s; adapters go through vLLM's own loading, which is slower", error)
            return None

    def _load(self) -> None:
        config, tensors = self._manager.lora_config, adapter_tensors(self._sites)
        ranks = {name: value.shape[0] for name, value in tensors.items() if "lora_A" in name}
        rank = max(ranks.values())
        if rank > config.max_lora_rank:
            raise EngineError(
                f"the adapter has rank {rank}, the engine was built with max_lora_rank="
                f"{config.max_lora_rank}; raise that option"
            )
        targets = sorted({name.split(".")[-3] for name in ranks})
        given = {"r": rank, "lora_alpha": rank, "target_modules": targets}
        model = self._lora_model.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            self._peft_helper.from_dict(given),
            device=self._device,
            dtype=config.lora_dtype,
            weights_mapper=self._mapper,
        )
        self._manager.remove_adapter(ADAPTER_ID)
        self._manager.add_adapter(model)
        self._manager.activate_adapter(ADAPTER_ID)


@torch.no_grad()
def adapter_tensors(sites: Sequence[LoraSite]) -> dict[str, Tensor]:
    """A and scaled B of every site by PEFT's names; never the trainer's own tensors."""
    tensors: dict[str, Tensor] = {}
    for site in sites:
        factors = site.factors()
        a = torch.cat([pair.a for pair in factors], 0)
        b = torch.cat([pair.b * pair.scaling for pair in factors], 1)
        name = f"{PEFT_PREFIX}{site.name}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    return tensors


def _renames(model: Any) -> Any:
    """The model's mapping of checkpoint names to its own, without that of fused layers."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for unstack in ("get_rename_mapper", "get_unstacked_mapper"):  # 0.32's name, 0.25's
        if hasattr(mapper, unstack):
            return getattr(mapper, unstack)()
    return mapper


class SlotError(EngineError):
    """vLLM's adapter slots cannot take this adapter."""


class SlotManager(Protocol):
    """What is used of vLLM's ``LoRAModelManager``.

    Attributes:
        modules: layer by name, each with ``lora_a_stacked``, ``lora_b_stacked`` and
            ``reset_lora(slot)``.
        packed_modules: the names of the checkpoint's modules inside a fused layer, in order.
        lora_index_to_id: the adapter id in each slot.
    """

    modules: Mapping[str, Any]
    packed_modules: Mapping[str, Sequence[str]]
    lora_index_to_id: Sequence[int | None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One slice of a layer: its stacked tensors, and which rows of which site's B belong there."""

    layer: str
    stacked_a: Tensor
    stacked_b: Tensor
    site: LoraSite | None
    rows: slice


class SlotWriter:
    """Writes one adapter's present factors into its slot.

    Args:
        manager: vLLM's manager, with the adapter activated (``add_lora``).
        sites: the trainer's modules, see ``lora_sites``; several active adapters are written one
            below the other in the rank.
        lora_id: the adapter's id in vLLM.
        rename: the trainer's module name to vLLM's; for models whose names differ.

    Raises:
        SlotError: the slots are not as expected (tensor parallelism, mixture-of-experts layers, no
            such layer), or the rank is too high. What is missing would be a part of the policy,
            so nothing is left out silently.
    """

    def __init__(
        self,
        manager: SlotManager,
        sites: Sequence[LoraSite],
        lora_id: int,
        *,
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        self._manager, self._id = manager, lora_id
        self._parts, self._idle = _match(manager, {rename(site.name): site for site in sites})
        self._check_ranks()
        self._slot: int | None = None

    @property
    def slot(self) -> int:
        """The adapter's place now.

        Raises:
            SlotError: the adapter is not active in vLLM (any more).
        """
        if self._id not in self._manager.lora_index_to_id:
            raise SlotError(
                f"lora slots: adapter {self._id} is not active in vLLM (active: "
                f"{[i for i in self._manager.lora_index_to_id if i is not None]}); add it first, "
                "and give the engine max_loras for all adapters"
            )
        return self._manager.lora_index_to_id.index(self._id)

    @torch.no_grad()
    def write(self) -> None:
        """Copies the factors as they are now; launches kernels and waits for nothing.

        Raises:
            SlotError: the adapter is not active, or its shapes have changed.
        """
        slot = self.slot
        if slot != self._slot:  # a slot that is new to us: the padding may hold anything
            for part in self._parts:
                part.stacked_a[slot].zero_()
                part.stacked_b[slot].zero_()
            for layer in self._idle:
                layer.reset_lora(slot)
        targets_a, targets_b, a, b, scalings = [], [], [], [], []
        for part, rank, factors in self._placed():
            targets_a.append(part.stacked_a[slot, 0, rank, : factors.a.shape[1]])
            targets_b.append(part.stacked_b[slot, 0, : part.rows.stop - part.rows.start, rank])
            a.append(factors.a)
            b.append(factors.b[part.rows])
            scalings.append(factors.scaling)
        # Scaled in the trainer's precision, then rounded once to the slot's.
        scaled = torch.ops.aten._foreach_mul.ScalarList(b, scalings)
        torch.ops.aten._foreach_copy_.default(targets_a + targets_b, a + list(scaled))
        self._slot = slot

    def _placed(self) -> Iterator[tuple[_Part, slice, Any]]:
        """Each pair of factors with its rows of the rank, one adapter after another."""
        for part in self._parts:
            at = 0
            for factors in part.site.factors() if part.site else ():
                rank, inner = factors.a.shape
                if factors.b.shape[0] < part.rows.stop or inner > part.stacked_a.shape[-1]:
                    raise SlotError(
                        f"lora slots: {part.layer}: A {tuple(factors.a.shape)} and B "
                        f"{tuple(factors.b.shape)} do not fit the layer's slots "
                        f"{tuple(part.stacked_a.shape)} and {tuple(part.stacked_b.shape)}"
                    )
                yield part, slice(at, at + rank), factors
                at += rank

    def _check_ranks(self) -> None:
        for part, rank, _ in self._placed():
            if rank.stop > part.stacked_a.shape[2]:
                raise SlotError(
                    f"lora slots: {part.layer} needs rank {rank.stop}, the engine has "
                    f"{part.stacked_a.shape[2]}; build it with max_lora_rank >= {rank.stop}"
                )


def _match(manager: SlotManager, sites: Mapping[str, LoraSite]) -> tuple[list[_Part], list[Any]]:
    """Every slice of the layers that hold a site, and the layers that hold none."""
    if missing := [a for a in ("modules", "packed_modules") if not hasattr(manager, a)]:
        raise SlotError(f"lora slots: this vLLM's LoRA manager has no {missing}; load by vLLM")
    parts: list[_Part] = []
    idle, left = [], set(sites)
    for name, layer in manager.modules.items():
        inner_names = manager.packed_modules.get(name) or [name]
        if left.isdisjoint(inner_names):
            idle.append(layer)
            continue
        left.difference_update(inner_names)
        parts += _parts(name, _stacked(name, layer), [sites.get(inner) for inner in inner_names])
    if left:
        raise SlotError(
            f"lora slots: vLLM has no LoRA layer for {', '.join(sorted(left)[:3])}"
            f"{f' and {len(left) - 3} more' if len(left) > 3 else ''}; leave them out of "
            "target_modules, or fold the adapter (route 'fold')"
        )
    return parts, idle


def _parts(
    name: str, stacked: Sequence[tuple[Tensor, Tensor]], sites: Sequence[LoraSite | None]
) -> Iterator[_Part]:
    """The layer's slices in order; a site takes as many as its B has rows for."""
    one_each = len(stacked) == len(sites)
    if not one_each and None in sites:
        # How many slices the absent module covers is written nowhere.
        raise SlotError(
            f"lora slots: {name} has {len(stacked)} slices for {len(sites)} modules, and not all "
            "of them have an adapter; load by vLLM"
        )
    at = 0
    for site in sites:
        if site is None:
            yield _Part(name, *stacked[at], None, slice(0, 0))
            at += 1
            continue
        wanted, rows = site.factors()[0].b.shape[0], 0
        while rows < wanted and at < len(stacked):
            a, b = stacked[at]
            size = min(b.shape[2], wanted - rows)  # a head's slot is padded to 64 rows
            yield _Part(name, a, b, site, slice(rows, rows + size))
            rows, at = rows + size, at + 1
            if one_each or (size < b.shape[2] and len(stacked) > 1):
                break
        if rows != wanted:
            raise SlotError(
                f"lora slots: {name} has {rows} rows for the {wanted} of {site.name}; load by vLLM"
            )


def _stacked(name: str, layer: Any) -> list[tuple[Tensor, Tensor]]:
    a, b = getattr(layer, "lora_a_stacked", None), getattr(layer, "lora_b_stacked", None)
    if getattr(layer, "tp_size", 1) != 1:
        raise SlotError(
            f"lora slots: {name} is split over {layer.tp_size} devices; slots are written for "
            "tensor_parallel_size=1 only"
        )
    as_list = [[t] if isinstance(t, Tensor) else list(t or ()) for t in (a, b)]
    if not as_list[0] or any(t.dim() != 4 or t.shape[1] != 1 for t in as_list[0] + as_list[1]):
        raise SlotError(
            f"lora slots: {name} ({type(layer).__name__}) does not keep its adapters as "
            "[slots, 1, rank, in] and [slots, 1, out, rank] (mixture of experts?); load by vLLM"
        )
    return list(zip(*as_list, strict=True))
