"""The trainer's LoRA factors in vLLM's adapter slots, without a file.

vLLM's requests name an adapter by a path, and its loader reads that. But the worker loads nothing
for an adapter that its manager already has, so the factors are handed to the manager, as a model
object of vLLM's own under the id that the requests carry. Activating it copies them into the
stacked tensors of its slot: addresses stay, so CUDA graphs do, and nothing of the trainer is
aliased. After that the engine must drop its prefix cache: cached keys and values are of the old
adapter.

It takes one private attribute of vLLM (``WorkerLoRAManager._adapter_manager``), checked here and by
a contract test. Works on objects it is handed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fxrl.engines.engine import EngineError
from fxrl.engines.weights.lora.sites import PEFT_PREFIX, LoraSite

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


def put_adapter(
    worker: Any, sites: Sequence[LoraSite], *, lora_model: Any, peft_helper: Any
) -> None:
    """Puts the factors as they are now into the slot of ``ADAPTER_ID``.

    Args:
        worker: vLLM's.
        sites: the trainer's modules, see ``lora_sites``; adapters that are active together become
            one of the summed rank.
        lora_model, peft_helper: vLLM's classes ``LoRAModel`` and ``PEFTHelper``.

    Raises:
        EngineError: vLLM takes no LoRA at some module, or the rank is above ``max_lora_rank``. What
            is missing would be a part of the policy, so nothing is left out silently.
    """
    manager, tensors = adapter_manager(worker), adapter_tensors(sites)
    ranks = {name: value.shape[0] for name, value in tensors.items() if "lora_A" in name}
    rank, limit = max(ranks.values()), manager.lora_config.max_lora_rank
    if rank > limit:
        raise EngineError(
            f"the adapter has rank {rank}, the engine was built with max_lora_rank={limit}; raise "
            "that option"
        )
    targets = sorted({name.split(".")[-3] for name in ranks})
    model = lora_model.from_lora_tensors(
        ADAPTER_ID,
        tensors,
        # Scaling is in B by now: vLLM would multiply it in place, into whatever it was given.
        peft_helper.from_dict({"r": rank, "lora_alpha": rank, "target_modules": targets}),
        device=str(worker.device),
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=_renames(manager.model),
    )
    _refuse_unknown(manager, model.loras)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(model)
    manager.activate_adapter(ADAPTER_ID)


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


def _refuse_unknown(manager: Any, names: Iterable[str]) -> None:
    """vLLM passes over factors for which it has no layer."""
    known = {part for parts in manager.packed_modules.values() for part in parts}
    known |= manager.modules.keys()
    # An expert's projection is inside the layer that holds all experts.
    lost = [n for n in names if n not in known and not any(n.startswith(f"{k}.") for k in known)]
    if lost:
        raise EngineError(
            f"lora slots: vLLM has no LoRA layer for {', '.join(sorted(lost)[:3])}"
            f"{f' and {len(lost) - 3} more' if len(lost) > 3 else ''}; leave them out of "
            "target_modules, or fold the adapter (route 'fold')"
        )
