"""LoRA (Hu et al. 2021, arXiv:2106.09685) through PEFT."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.errors import optional, reason_of
from fxrl.models.hf import ModelError
from fxrl.models.trust import read_json


def _peft() -> Any:
    """PEFT; bitsandbytes, which it imports where that is installed, would tell of kernels that it
    does not find."""
    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return optional("peft", "LoRA")
    finally:
        log.setLevel(level)


def lora(
    model: nn.Module,
    r: int = 16,
    alpha: float | None = None,
    target_modules: str | Sequence[str] = "all-linear",
    *,
    dropout: float = 0.0,
    fp32_adapter: bool = True,
    seed: int | None = None,
) -> nn.Module:
    """Freezes ``model`` and puts a trainable x A^T B^T * alpha / r beside its linear layers.

    A is Kaiming-uniform and B zero, so the wrapped model starts with the same numbers. A sequence
    classifier's head, which is new, is trained itself.

    Args:
        model: a Hugging Face model; wrapped in place.
        r: rank.
        alpha: scale; ``None`` is ``2 * r``.
        target_modules: ``"all-linear"`` (every linear layer but the output layer; routers and
            experts whose weights are one tensor are none, and stay as they are), a list of name
            endings, or a regular expression over full names.
        dropout: on x, adapter only.
        fp32_adapter: keep A and B in fp32 on a bf16 or fp16 base, which is PEFT's default
            (``autocast_adapter_dtype``): an optimizer step of 1e-5 is below bf16's resolution for
            most entries. The product of the two is then computed in fp32 unless under autocast.
        seed: of A; ``None`` takes the global generator.

    Returns:
        A ``peft.PeftModel``; only ``lora_`` parameters, and a classifier's head, require grad.

    Raises:
        ModelError: a value is out of range, no layer matches, or there is an adapter already.
        MissingPackageError: peft is not installed.
    """
    if r < 1:
        raise ModelError(f"lora: r={r} is below 1; 8 to 64 is usual")
    if not 0 <= dropout < 1:
        raise ModelError(f"lora: dropout={dropout} is outside [0, 1); 0 is usual for RL")
    peft = _peft()
    if any(isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer) for m in model.modules()):
        raise ModelError(
            "lora: the model has an adapter already; train that one (without another), merge it "
            "into the weights with merge_and_unload(), or load the model anew"
        )
    targets: Any = target_modules if isinstance(target_modules, str) else list(target_modules)
    if targets == "all-linear":
        targets = _linear_layers(model)
    config = peft.LoraConfig(
        r=r,
        lora_alpha=2 * r if alpha is None else alpha,
        target_modules=targets,
        lora_dropout=dropout,
        bias="none",
        task_type="SEQ_CLS" if is_classifier(model) else "CAUSAL_LM",
        fan_in_fan_out=_stores_transposed(model),
    )
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        try:
            return _wrapped(model, config, fp32_adapter)
        except ValueError as error:
            raise ModelError(
                f"lora: target_modules={target_modules!r} does not work here "
                f"({reason_of(error)}); 'all-linear' fits every model"
            ) from error


@dataclass(frozen=True, slots=True)
class StoredAdapter:
    """An adapter in a folder, as PEFT saves it.

    Attributes:
        folder: with ``adapter_config.json`` and the adapter's weights.
        base: path or hub id of the model that it was trained on.
        rank: the largest of its modules'; ``None`` if it has none (no LoRA).
        is_classifier: it holds the head of a sequence classifier, too.
    """

    folder: Path
    base: str
    rank: int | None
    is_classifier: bool

    def put_on(self, model: nn.Module) -> nn.Module:
        """Wraps ``base``, in place, by the adapter, which is trained, in fp32 on a bf16 base as
        ``lora``'s. Raises ``ModelError`` if its weights do not fit the model."""
        peft = _peft()
        try:
            config = peft.PeftConfig.from_pretrained(str(self.folder))
        except Exception as error:  # of whatever stands in it
            raise ModelError(
                f"adapter {str(self.folder)!r}: peft {peft.__version__} cannot read its "
                f"adapter_config.json ({error!r:.200}); correct it, or upgrade peft"
            ) from error
        if config.is_prompt_learning:
            raise ModelError(
                f"adapter {str(self.folder)!r} is {config.peft_type.value}: learned prompts cannot "
                "be trained on here; take LoRA"
            )
        config.inference_mode = False
        config.base_model_name_or_path = None  # which is the model's own from here on
        try:
            with torch.random.fork_rng():  # what is drawn is overwritten
                made = _wrapped(model, config)
            stored = peft.load_peft_weights(str(self.folder), device="cpu")
            found = peft.set_peft_model_state_dict(made, stored)
            own = peft.get_peft_model_state_dict(made, save_embedding_layers=False)
            wrong = sorted({*found.unexpected_keys, *(own.keys() - stored.keys())})
        # PEFT and the readers of its files have no common class of errors.
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise self._unfit(reason.splitlines()[-1].strip()[:200]) from error
        if wrong:
            raise self._unfit(f"{len(wrong)} weights are in one of them alone, such as {wrong[0]}")
        return made

    def _unfit(self, why: str) -> ModelError:
        return ModelError(
            f"adapter {str(self.folder)!r} cannot be put on its base model {self.base!r} ({why}); "
            "name the model that it was trained on as base_model_name_or_path of its "
            "adapter_config.json, or copy its files anew"
        )


def stored_adapter(model_id: str | Path) -> StoredAdapter | None:
    """The adapter that a folder holds; ``None`` of any other model. Raises ``ModelError`` if its
    ``adapter_config.json`` does not say what it belongs to."""
    folder = Path(os.path.expanduser(model_id))
    if not os.path.isfile(folder / "adapter_config.json"):  # a text may be no possible path
        return None
    table = read_json(folder / "adapter_config.json")
    base = table.get("base_model_name_or_path") if isinstance(table, dict) else None
    if not isinstance(base, str) or not base:
        raise ModelError(
            f"adapter {str(model_id)!r} names no base model; write its folder or hub id into "
            "adapter_config.json as base_model_name_or_path"
        )
    if os.path.isfile(Path(base, "adapter_config.json")):
        raise ModelError(
            f"adapter {str(model_id)!r}: its base model {base!r} is an adapter itself; merge that "
            "into its own base model (PEFT's merge_and_unload), and name the result"
        )
    pattern = table.get("rank_pattern")
    ranks = [table.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    rank = max((r for r in ranks if isinstance(r, int)), default=None)
    return StoredAdapter(folder, base, rank, table.get("task_type") == "SEQ_CLS")


def is_adapted(model: nn.Module) -> bool:
    """Whether PEFT has wrapped the model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def _wrapped(model: nn.Module, config: Any, fp32_adapter: bool = True) -> nn.Module:
    # Without weights there is nothing to draw; PEFT makes such an adapter in fp32 and casts none.
    empty = fp32_adapter and all(w.is_meta and w.itemsize <= 4 for w in model.parameters())
    with warnings.catch_warnings():
        # PEFT reads this attribute of every model, and transformers has another name for it.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is", FutureWarning)
        # PEFT's own patterns for experts, of which a model may have none.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
        made: nn.Module = _peft().get_peft_model(
            model, config, autocast_adapter_dtype=fp32_adapter, low_cpu_mem_usage=empty
        )
    return made


def is_classifier(model: nn.Module) -> bool:
    """Whether a model of transformers has labels for whole sequences on top, in place of tokens."""
    return type(model).__name__.endswith("ForSequenceClassification")


def _linear_layers(model: nn.Module) -> list[str]:
    """Name endings of the linear layers but the output layer; full names where these differ.

    NOTE [Why PEFT is not asked]: its "all-linear" takes a mixture's routers and 3-D expert weights
    along, under parametrizations that end a traced graph in every layer.
    """
    kinds = (nn.Linear, optional("transformers.pytorch_utils", "LoRA").Conv1D)
    output: Any = getattr(model, "get_output_embeddings", None)
    head = getattr(model, "score", None) if is_classifier(model) else output() if output else None
    linear = {name for name, m in model.named_modules() if isinstance(m, kinds) and m is not head}
    others = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in linear}
    endings = {name.rpartition(".")[2] for name in linear}
    return sorted(linear if endings & others else endings)


def _stores_transposed(model: nn.Module) -> bool:
    """GPT-2's layers keep their weight as [in, out]; PEFT wants to be told."""
    conv1d = optional("transformers.pytorch_utils", "LoRA").Conv1D
    return any(isinstance(module, conv1d) for module in model.modules())
