"""A LoRA adapter from tensors in memory into vLLM's adapter manager; no disk, no patched class.

vLLM's requests name an adapter by a path and its loader reads that. But the worker loads nothing
for an adapter that its manager already has, so the adapter is handed to the manager under the id
that the requests carry. That takes one private attribute of vLLM
(``WorkerLoRAManager._adapter_manager``), checked here and by a contract test.

Scaling is multiplied into B beforehand (vLLM would multiply it in place, into whatever tensor it
was given) and adapters that are active together become one of the summed rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxrl.runtime.engine import EngineError
from fxrl.runtime.lora_sites import LoraSite

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


@torch.no_grad()
def adapter_tensors(sites: Sequence[LoraSite]) -> dict[str, Tensor]:
    """A and scaled B of every site by PEFT's names; never the trainer's own tensors."""
    tensors: dict[str, Tensor] = {}
    for site in sites:
        factors = site.factors()
        a = torch.cat([pair.a for pair in factors], 0)
        b = torch.cat([pair.b * pair.scaling for pair in factors], 1)
        name = f"base_model.model.{site.name}"
        tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    return tensors


def set_adapter(
    worker: Any, tensors: dict[str, Tensor], *, lora_model: Any, peft_helper: Any
) -> None:
    """Makes ``tensors`` the adapter number ``ADAPTER_ID``, in place of the one before.

    Args:
        tensors: as ``adapter_tensors`` makes them.
        lora_model, peft_helper: vLLM's classes ``LoRAModel`` and ``PEFTHelper``.

    Raises:
        EngineError: the rank is above ``max_lora_rank``, or vLLM takes no LoRA at some module.
    """
    manager = adapter_manager(worker)
    config = manager.lora_config
    ranks = {name: value.shape[0] for name, value in tensors.items() if "lora_A" in name}
    rank = max(ranks.values())
    if rank > config.max_lora_rank:
        raise EngineError(
            f"the adapter has rank {rank}, the engine was built with max_lora_rank="
            f"{config.max_lora_rank}; raise that option"
        )
    targets = sorted({name.split(".")[-3] for name in ranks})
    helper = peft_helper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": targets})
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    for unstack in ("get_rename_mapper", "get_unstacked_mapper"):  # 0.32's name, 0.25's
        if hasattr(mapper, unstack):
            mapper = getattr(mapper, unstack)()
            break
    model = lora_model.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        helper,
        device=str(worker.device),
        dtype=config.lora_dtype,
        weights_mapper=mapper,
    )
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(model)
    manager.activate_adapter(ADAPTER_ID)
