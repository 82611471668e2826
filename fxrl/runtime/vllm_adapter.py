"""A LoRA adapter from tensors in memory into vLLM's adapter manager; no disk, no patched class.

vLLM's requests name an adapter by a path and its loader reads that. But the worker loads nothing
for an adapter that its manager already has, so the adapter is handed to the manager under the id
that the requests carry. That takes one private attribute of vLLM
(``WorkerLoRAManager._adapter_manager``), checked here and by a contract test.

Scaling is multiplied into B beforehand (vLLM would multiply it in place, into whatever tensor it
was given) and adapters that are active together become one of the summed rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxrl.runtime.engine import EngineError
from fxrl.runtime.lora_sites import PEFT_PREFIX, LoraSite
from fxrl.runtime.lora_slots import SlotError, SlotWriter

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
