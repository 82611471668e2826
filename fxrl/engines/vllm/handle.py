"""What fxrl uses inside a built ``vllm.LLM``; objects are handed in, vLLM is not imported.

Each access to something that is not vLLM's public interface is one small method here.

NOTE [How vLLM gets an adapter without a file]
vLLM's requests name an adapter by a path, and its loader reads that. But the worker loads nothing
for an adapter that its manager already has, so the factors are handed to the manager, as a model
object of vLLM's own under the id that the requests carry. Activating it copies them into the
stacked tensors of its slot: addresses stay, so CUDA graphs do, and nothing of the trainer is
aliased. After that the engine must drop its prefix cache: cached keys and values are of the old
adapter.
It takes one private attribute of vLLM (``WorkerLoRAManager._adapter_manager``), checked here and by
a contract test.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.engines.engine import EngineError
from fxrl.engines.ledger import Tags
from fxrl.engines.vllm.requests import EngineFailedError, step
from fxrl.engines.vllm.standby import tag_bytes
from fxrl.engines.weights.lora.sites import PEFT_PREFIX, LoraSite
from fxrl.errors import TESTED

log = logging.getLogger(__name__)

DRAIN_S = 60.0
"""How long work in flight may take to end; a step takes milliseconds."""


@dataclass(frozen=True, slots=True)
class VllmSymbols:
    """The names that fxrl uses of the installed vLLM."""

    module: Any  # ``vllm`` itself (``LLM``, ``EngineArgs``, ``SamplingParams``)
    device: str  # ``"cuda"`` or ``"cpu"``
    tokens_prompt: Callable[[list[int]], Any]  # token ids -> a prompt for ``add_request``
    final_only: Any  # ``RequestOutputKind.FINAL_ONLY``: no output for unfinished requests
    lora_request: Any  # the class ``LoRARequest``
    lora_model: Any  # ``LoRAModel``
    peft_helper: Any  # ``PEFTHelper``
    allocator: Callable[[], Any]  # the process's allocator of tagged pools; ``None`` before any
    # Enters a vLLM configuration that compiles nothing. Once vLLM's "transformers" backend is
    # imported, Hugging Face's classes are patched and ask for a current configuration.
    quiet_config: Callable[[], Any]

    def tags(self) -> Tags:
        """The tagged pools of whatever engines there are; for ``ledger.Probe``."""
        allocator = self.allocator()
        return {} if allocator is None else tag_bytes(allocator.pointer_to_data)


class VllmHandle:
    """A built engine, seen from inside. With ``tensor_parallel_size`` above 1 the model is in other
    processes; ``max_lora_rank`` is that of the LoRA slots, ``None`` without any."""

    def __init__(
        self, llm: Any, symbols: VllmSymbols, tensor_parallel_size: int, max_lora_rank: int | None
    ) -> None:
        self.llm, self.symbols = llm, symbols
        self._ranks, self._max_lora_rank = tensor_parallel_size, max_lora_rank
        self.sampling_fields: tuple[str, ...] = tuple(
            symbols.module.SamplingParams.__struct_fields__
        )

    @property
    def engine(self) -> Any:
        return self.llm.llm_engine

    @property
    def config(self) -> Any:
        return self.engine.model_config

    @property
    def worker(self) -> Any:
        if self._ranks > 1:
            raise EngineError(
                f"tensor_parallel_size={self._ranks}: vLLM's model is in other processes, so "
                "its weights cannot be shared and its adapters not set; update_weights copies them"
            )
        worker = getattr(self.engine.model_executor, "driver_worker", None)
        worker = getattr(worker, "worker", worker)
        if not hasattr(worker, "model_runner"):
            raise EngineError(
                "this vLLM keeps no worker at llm_engine.model_executor.driver_worker; use a "
                f"tested version: {', '.join(TESTED['vllm'])}"
            )
        return worker

    def model(self) -> nn.Module:
        model = self.worker.model_runner.get_model()
        assert isinstance(model, nn.Module), "vLLM runs a torch module"
        return model

    def model_to_share(self) -> nn.Module:
        """The model; an empty one, in which nothing is found, if it is in other processes."""
        if self._ranks == 1:
            return self.model()
        log.warning(
            "tensor_parallel_size=%d: vLLM's weights are in other processes and cannot be shared; "
            "the trainer has its own, and all of them are copied at each update",
            self._ranks,
        )
        return nn.Module()

    def cpu_bytes(self) -> Mapping[str, int]:
        """Sizes of weights and KV cache where no tagged allocator knows them."""
        if self._ranks > 1:
            return {}
        caches = getattr(self.worker.model_runner, "kv_caches", [])
        tensors = [cache for cache in caches if isinstance(cache, Tensor)]
        return {
            "weights": sum(p.nbytes for p in self.model().parameters()),
            "kv_cache": sum(cache.nbytes for cache in tensors),
        }

    def drain(self, *, all_the_way: bool = False) -> None:
        """Finish what is in flight: asynchronous scheduling runs a step ahead. ``all_the_way`` goes
        on until the scheduler has told the worker of all finished requests too, which vLLM's own
        release of the KV cache requires."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        deadline = time.monotonic() + DRAIN_S
        while getattr(core, "batch_queue", None) or (
            all_the_way and core is not None and core.scheduler.has_requests()
        ):
            step(self.engine)
            if time.monotonic() > deadline:
                raise EngineFailedError(f"vLLM has had work in flight for {DRAIN_S:g} s; it hangs")

    def reset_prefix_cache(self) -> None:
        """Forgets the KV entries of earlier prompts, which belong to earlier weights."""
        if self.llm.reset_prefix_cache() is False:
            raise EngineError("vLLM did not drop its prefix cache: requests are still running")

    def requests(
        self,
        prompts: list[tuple[int, ...]],
        seeds: list[int | None],
        arguments: Mapping[str, Any],
        limits: list[int],
    ) -> list[tuple[Any, Any]]:
        """vLLM's prompt and sampling parameters of each sample; a prompt is repeated ``len(seeds) /
        len(prompts)`` times. ``limits`` bound the tokens of each prompt's completions."""
        make, each = self.symbols.module.SamplingParams, len(seeds) // len(prompts)
        arguments = {**arguments, "output_kind": self.symbols.final_only}
        least = arguments.get("min_tokens", 0)
        repeated = [pair for pair in zip(prompts, limits, strict=True) for _ in range(each)]
        return [
            (
                self.symbols.tokens_prompt(list(prompt)),
                make(
                    **{**arguments, "max_tokens": most, "min_tokens": min(least, most)}, seed=seed
                ),
            )
            for (prompt, most), seed in zip(repeated, seeds, strict=True)
        ]

    @property
    def lora_request(self) -> Any:
        """What requests carry to be answered with the adapter."""
        return self.symbols.lora_request(ADAPTER_NAME, ADAPTER_ID, "in-memory")

    @property
    def takes_adapters(self) -> str:
        """Empty if the engine has LoRA slots, else the reason why not."""
        if self._max_lora_rank is None:
            return "the engine was built without LoRA slots (max_lora_rank=None)"
        return "" if self._ranks == 1 else "vLLM's slots are in other processes"

    def set_adapter(self, sites: tuple[LoraSite, ...]) -> None:
        """Puts the adapter into the engine's slots."""
        symbols = self.symbols
        put_adapter(
            self.worker, sites, lora_model=symbols.lora_model, peft_helper=symbols.peft_helper
        )

    def reload(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load new weights, by checkpoint names; to other processes they go through host memory."""
        given: Any = weights
        if self._ranks > 1:
            given = [(name, value.cpu()) for name, value in weights]
        elif self.symbols.device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
            given = ((name, value.to(device)) for name, value in weights)
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": given})
        except (KeyError, ValueError, RuntimeError, AttributeError) as error:
            raise EngineError(
                f"vLLM could not take the new weights ({type(error).__name__}: {error}); names "
                "and shapes must be the checkpoint's. The engine may hold some of them: give "
                "it all weights once more before generating"
            ) from error

    def shutdown(self) -> None:
        """Ends vLLM and frees what nobody else holds."""
        with suppress(EngineError):  # in other processes it ends with them
            unhook(self.model())
        engine, self.llm = self.llm.llm_engine, None
        engine.engine_core.shutdown()
        del engine
        free_unheld()


def unhook(model: nn.Module | None) -> None:
    """Takes a model out of what the process keeps of it: Dynamo's hooks, vLLM's tables of slots."""
    if model is not None:
        _forget_bytecode_hooks(model)
        _forget_slots(model)


def _forget_bytecode_hooks(model: nn.Module) -> None:
    """vLLM removes the hook that a module has registered last. A compiled module whose base class
    is compiled as well (Qwen3 on Qwen2) registers two, and the first would hold all weights."""
    for module in model.modules():
        handle = getattr(module, "_bytecode_hook_handle", None)
        hooks: dict[int, Any] = {} if handle is None else handle.hooks_dict_ref() or {}
        for key, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is module:
                del hooks[key]


SLOT_TABLES = ("_LORA_A_PTR_DICT", "_LORA_B_PTR_DICT")


def _forget_slots(model: nn.Module) -> None:
    """vLLM's kernels look adapter slots up by their addresses, in tables that keep every engine's.

    They would hold the slots, and be believed by a later engine whose slots lie at an address of
    these. Only this model's go: CUDA graphs of an open engine read tensors that its entries hold.
    """
    kernels = sys.modules.get("vllm.lora.ops.triton_ops.utils")
    slots = {
        slot.data_ptr()
        for module in model.modules()
        for name, value in vars(module).items()
        if name.endswith("_stacked")
        for slot in ([value] if isinstance(value, Tensor) else value)
        if isinstance(slot, Tensor)
    }
    for name in SLOT_TABLES:
        table: dict[tuple[int, ...], Any] = getattr(kernels, name, {})
        for addresses in [key for key in table if not slots.isdisjoint(key)]:
            del table[addresses]


def free_unheld() -> None:
    """Gives memory that nobody holds back to the device, after an engine is gone."""
    gc.unfreeze()  # vLLM freezes what exists after its start-up, cycles included
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


ADAPTER_ID = 1
ADAPTER_NAME = "fxrl-policy"


def adapter_manager(worker: Any) -> Any:
    """vLLM's ``LoRAModelManager``; ``EngineError`` if this version keeps it somewhere else."""
    manager = getattr(worker.model_runner, "lora_manager", None)
    inner = getattr(manager, "_adapter_manager", None)
    wanted = ("add_adapter", "remove_adapter", "activate_adapter", "lora_config")
    lacking = [name for name in wanted if not hasattr(inner, name)]
    if lacking:
        raise EngineError(
            f"this vLLM's LoRA manager lacks {', '.join(lacking)} at model_runner.lora_manager."
            "_adapter_manager; train with folded adapters (max_lora_rank=None), or use a "
            f"tested version: {', '.join(TESTED['vllm'])}"
        )
    return inner


def put_adapter(
    worker: Any, sites: Sequence[LoraSite], *, lora_model: Any, peft_helper: Any
) -> None:
    """Put the present factors of ``sites`` into the slot of ``ADAPTER_ID``; adapters that are
    active together become one of the summed rank.

    Raises ``EngineError`` if vLLM takes no LoRA at some module, or the rank is above
    ``max_lora_rank``: a part of the policy would be missing, so nothing is left out silently.
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
