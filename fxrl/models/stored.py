"""How checkpoints store quantised weights: read as they are, and written again with equal bytes.

| ``quantization_config`` | a Linear's tensors | read as |
| --- | --- | --- |
| ``compressed-tensors``, 8-bit floats | ``weight``, ``weight_scale``: one, a row, a block | fp8 |
| ``compressed-tensors``, 4-bit integers | ``weight_packed``, ``weight_scale``: a group | int4 |
| ``fp8`` (DeepSeek, vLLM) | ``weight``, ``weight_scale_inv`` or ``weight_scale`` | fp8 |
| ``bitsandbytes``, NF4, scales in 8 bits or not | ``weight``, ``weight.absmax``, ... | nf4 |

Which Linears are quantised is read off the tensors, as lists of exceptions are spelt in many ways.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch import Tensor

from fxrl.ir.site import names_module
from fxrl.models.hf import ModelError
from fxrl.ops.dequantized import GROUP, NF4, Format
from fxrl.ops.fp8 import BLOCK, E4M3, Recipe, read_scale

#: A Linear's tensors in a checkpoint, by their names behind its own.
Stored = dict[str, Tensor]
#: Names of the values themselves.
WEIGHTS = ("weight", "weight_packed")
_STATE = "weight.quant_state.bitsandbytes__nf4"
_SCALES = ("weight_scale", "weight_scale_inv")
_PACKED = WEIGHTS[1]
_SKIPPED = "llm_int8_skip_modules"


def stored_format(config: Mapping[str, Any] | None) -> Format | None:
    """The format of a checkpoint's Linears by its ``quantization_config``; None is left to
    transformers. Raises ``ModelError`` for a variant that is not read."""
    config = config or {}
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_format(config)
    if method == "fp8":
        _refuse_other("fmt", config.get("fmt", "e4m3"), "e4m3")
        _refuse_other("weight_block_size", config.get("weight_block_size"), None, [BLOCK, BLOCK])
        return "fp8"
    if method == "bitsandbytes":
        _refuse_other("load_in_4bit", config.get("load_in_4bit", False), True)
        _refuse_other("bnb_4bit_quant_type", config.get("bnb_4bit_quant_type", "fp4"), "nf4")
        _refuse_other("quant_storage", config.get("bnb_4bit_quant_storage", "uint8"), "uint8")
        return "nf4"
    return None


def _compressed_format(config: Mapping[str, Any]) -> Format:
    found: set[Format] = set()
    for group in _groups(config):
        weights = group.get("weights") or {}
        bits, strategy = weights.get("num_bits"), weights.get("strategy", "tensor")
        if weights.get("type", "int") == "float":
            _refuse_other("weights.num_bits", bits, 8)
            _refuse_other("weights.strategy", strategy, "tensor", "channel", "block")
            size = weights.get("block_structure")
            _refuse_other("weights.block_structure", size, None, [BLOCK, BLOCK])
            found.add("fp8")
        else:
            _refuse_other("weights.num_bits", bits, 4)
            _refuse_other("weights.strategy", strategy, "channel", "group")
            _refuse_other("weights.symmetric", weights.get("symmetric", True), True)
            _refuse_other("weights.actorder", weights.get("actorder"), None, "weight", "static")
            found.add("int4")
    if len(found) != 1:
        raise ModelError(f"quantization_config: it asks for {sorted(found)}, and one way is read")
    return found.pop()


def _groups(config: Mapping[str, Any]) -> Collection[Mapping[str, Any]]:
    """The groups of compressed-tensors' configuration, each of which describes some Linears."""
    return dict(config.get("config_groups") or {}).values()


def _refuse_other(key: str, value: object, *known: object) -> None:
    if value not in known:
        read = " or ".join(repr(one) for one in known if one is not None)
        raise ModelError(
            f"quantization_config: {key}={value!r} is not read, only {read}; load the checkpoint "
            "in bf16, with quantization='fp8' or 'nf4'"
        )


def recipe_of(config: Mapping[str, Any] | None) -> Recipe:
    """How the scales of a checkpoint's weights in FP8 lie."""
    config = config or {}
    told = {(one.get("weights") or {}).get("strategy", "tensor") for one in _groups(config)}
    if config.get("quant_method") == "fp8":
        told = {"block" if config.get("weight_block_size") else "tensor"}
    return next((recipe for recipe in ("block", "tensor") if recipe in told), "row")


def names_stored(names: Container[str], path: str) -> bool:
    """Whether a checkpoint of tensors of these names has a module's weight quantised."""
    return any(f"{path}.{name}" in names for name in (_PACKED, _STATE, *_SCALES))


def words_stored(config: Mapping[str, Any], path: str, kind: str) -> bool:
    """Whether ``quantization_config`` alone says that a module's weight is quantised. ``kind`` is
    ``"Linear"``, ``"Embedding"`` or ``"head"``, a Linear that is not quantised by default:
    bitsandbytes quantises it if a list names what to leave out, FP8 never."""
    lists = (config.get(key) for key in ("ignore", "modules_to_not_convert", _SKIPPED))
    left = next((one for one in lists if one is not None), None)
    if any(_named(pattern, path) for pattern in left or ()):
        return False
    if config["quant_method"] != "compressed-tensors":
        told = config["quant_method"] == "bitsandbytes" and left is not None
        return kind == "Linear" or (kind == "head" and told)
    targets = [target for group in _groups(config) for target in group.get("targets") or ()]
    layer = "Embedding" if kind == "Embedding" else "Linear"
    return any(target == layer or _named(target, path) for target in targets)


def _named(pattern: str, path: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), path) is not None
    return names_module(pattern, path)


def is_stored(stored: Stored) -> bool:
    """Whether these are the tensors of a quantised Linear."""
    return _PACKED in stored or ("weight" in stored and stored["weight"].dtype.itemsize == 1)


def read_stored(stored: Stored, shape: torch.Size, format: Format) -> tuple[Tensor, Tensor]:
    """Values and scales of a Linear's weight [N, K], as ``fxrl.ops.dequantized`` has them. Raises
    ``ValueError``, in words that begin "its", if the tensors do not make such a weight."""
    if format == "int4":
        return _read_int4(stored, shape)
    values = stored["weight"]
    if format == "nf4":
        return _read_nf4(stored, shape)
    if values.dtype != E4M3 or values.shape != shape:
        raise ValueError(f"its weight is {values.dtype} {list(values.shape)}, not e4m3")
    scale = next((stored[name] for name in _SCALES if name in stored), None)
    if scale is None:
        raise ValueError("its weight is FP8, and it has no scales")
    return values, read_scale(scale, shape)


def _read_int4(stored: Stored, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Eight codes an int32, the first the lowest, are four bytes of two."""
    (rows, columns), scale = shape, stored["weight_scale"].float()
    if "weight_zero_point" in stored or "weight_g_idx" in stored:
        raise ValueError("its 4-bit integers have zero points or groups in an order of their own")
    groups = columns // GROUP
    if columns % GROUP or scale.shape[0] != rows or groups % scale.shape[1]:
        wanted = f"one for each group of a multiple of {GROUP}"
        raise ValueError(f"its scales have shape {[*scale.shape]}, which is not {wanted}")
    packed = stored[_PACKED].contiguous().view(torch.uint8)
    return packed, scale.repeat_interleave(groups // scale.shape[1], 1)


def _read_nf4(stored: Stored, shape: torch.Size) -> tuple[Tensor, Tensor]:
    rows, columns = shape
    if _STATE not in stored:
        raise ValueError("its weight is in 4 bits, and what tells how is not there")
    state = json.loads(bytes(stored[_STATE].tolist()))
    if [*state["shape"]] != [rows, columns] or state["blocksize"] != GROUP or columns % GROUP:
        told = f"{state['shape']} in groups of {state['blocksize']}"
        raise ValueError(f"its weight is {told}, not {[*shape]} in groups of {GROUP}")
    if not torch.equal(stored["weight.quant_map"].cpu(), torch.tensor(NF4)):
        raise ValueError("its 4-bit codes are not NF4's")
    scale = stored["weight.absmax"]
    if "weight.nested_absmax" in stored:
        outer = stored["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])
        code = stored["weight.nested_quant_map"][scale.int()]
        scale = code * outer[: len(code)] + state["nested_offset"]
    return _turned(stored["weight"]).view(rows, columns // 2), scale.float().view(rows, -1)


def _turned(packed: Tensor) -> Tensor:
    """Two codes a byte the other way round: bitsandbytes' first is the high one."""
    return packed << 4 | packed >> 4


def to_store(values: Tensor, scale: Tensor, format: Format, kept: Stored) -> Stored:
    """The tensors that ``read_stored`` reads as these values and scales. ``kept`` is what a
    checkpoint had beside the weight, empty for a weight quantised here."""
    if format == "fp8":
        return {"weight": values, **(kept or {"weight_scale": scale})}
    if format == "int4":
        shape = torch.tensor([values.shape[0], 2 * values.shape[1]])
        kept = kept or {"weight_scale": scale, "weight_shape": shape}
        return {_PACKED: values.view(torch.int32), **kept}
    return {"weight": _turned(values).view(-1, 1), **(kept or _nf4_state(values, scale))}


def _nf4_state(values: Tensor, scale: Tensor) -> Stored:
    shape = [values.shape[0], 2 * values.shape[1]]
    state = {"quant_type": "nf4", "blocksize": GROUP, "dtype": "bfloat16", "shape": shape}
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    table = torch.tensor(NF4, device=values.device)
    return {"weight.absmax": scale.flatten(), "weight.quant_map": table, _STATE: told}


#: A recipe's scales in compressed-tensors' words.
_STRATEGIES: dict[Recipe, dict[str, Any]] = {
    "row": {"strategy": "channel"},
    "tensor": {"strategy": "tensor"},
    "block": {"strategy": "block", "block_structure": [BLOCK, BLOCK]},
}


def config_of(
    format: Format, recipe: Recipe, wide: list[str], *, embeddings: bool = False
) -> dict[str, Any]:
    """The ``quantization_config`` of a model that was quantised here, but for the Linears in
    ``wide``. ``embeddings`` were quantised too, which bitsandbytes has no word for."""
    if format == "nf4":
        options = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        options |= {"bnb_4bit_use_double_quant": False, "bnb_4bit_compute_dtype": "bfloat16"}
        return {"quant_method": "bitsandbytes", **options, _SKIPPED: wide}
    group: dict[str, Any] = {"targets": ["Linear"]}
    if format == "int4":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    else:
        weights = {"num_bits": 8, "type": "float", **_STRATEGIES[recipe]}
        rows = {"num_bits": 8, "type": "float", "strategy": "token"}
        if recipe == "block":
            rows |= {"strategy": "group", "group_size": BLOCK}
        group["input_activations"] = {**rows, "symmetric": True, "dynamic": True}
    group["weights"] = {**weights, "symmetric": True, "dynamic": False}
    groups = {"group_0": group}
    if embeddings:  # nothing is multiplied
        groups["group_1"] = {"targets": ["Embedding"], "weights": group["weights"]}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if format == "int4" else "float-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": wide,
    }
