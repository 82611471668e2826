"""How large a KV cache is, by a model's configuration; and what a rollout takes beside it.

    awake     weights | optimizer's states | engine | KV cache
    asleep    weights | optimizer's states | engine | what the update needs

An engine in this process samples with the trainer's own weights, and gives the memory of its KV
cache back for the update (``Engine.standby``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fxrl.config import MiB
from fxrl.engines.engine import EngineError
from fxrl.errors import ConfigError
from fxrl.models.host_embedding import held_on_host
from fxrl.models.quantized import dtype_of
from fxrl.models.sharded import Sharded

#: What vLLM keeps asleep or awake, whatever the model's size: workspaces and buffers, 0.24 GiB,
#: CUDA modules and graphs, 0.36 GiB (measured on an H200).
ENGINE_BYTES = 614 * MiB
#: Tokens of vLLM's blocks: a sequence takes whole ones.
_BLOCK = 16
_ADAM_STATES = 2
_ATTENTION = {"full_attention": False, "sliding_attention": True}


class KvCacheError(EngineError, ConfigError):
    """A model keeps something else than keys and values of tokens."""


@dataclass(frozen=True, slots=True)
class KvCache:
    token_bytes: int  # keys and values of one token in one layer
    full: int  # layers that hold all tokens
    windowed: Mapping[int, int]  # layers that hold those of a window, by its tokens

    @classmethod
    def of(cls, config: Any, width: int) -> KvCache:
        """From the text part of a Hugging Face configuration; ``width`` is the bytes of a number in
        the cache."""
        text = config.get_text_config()
        if getattr(text, "kv_lora_rank", None):
            raise KvCacheError(
                f"{text.model_type} caches latent vectors (kv_lora_rank={text.kv_lora_rank}), "
                "whose bytes are not known here; plan without a rollout"
            )
        count, queries, hidden = (
            _number(text, name)
            for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
        )
        heads = getattr(text, "num_key_value_heads", None) or queries
        head = getattr(text, "head_dim", None) or hidden // queries
        shared = getattr(text, "num_kv_shared_layers", None) or 0
        layers = Counter(_windows(text, count)[: count - shared])
        return cls(2 * heads * head * width, layers.pop(None, 0), dict(layers))

    def bytes(self, tokens: int) -> int:
        """Bytes of one sequence."""
        held = self.full * tokens
        held += sum(count * min(window, tokens) for window, count in self.windowed.items())
        return self.token_bytes * held

    def sequence_bytes(self, tokens: int) -> int:
        """The bytes of a sequence in whole blocks, as vLLM allocates them."""
        return self.bytes(-(-tokens // _BLOCK) * _BLOCK)


def _number(text: Any, name: str) -> int:
    if not isinstance(value := getattr(text, name, None), int):
        raise KvCacheError(
            f"{text.model_type}: {name}={value!r} does not tell the KV cache's bytes; plan without "
            "a rollout"
        )
    return value


def _windows(text: Any, count: int) -> list[Any]:
    """Each layer's window; None for a layer that holds all tokens."""
    window = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        return [window] * count
    if unknown := sorted(set(kinds) - _ATTENTION.keys()):
        raise KvCacheError(
            f"{text.model_type} has layers of {', '.join(unknown)}, whose cache's bytes are not "
            "known here; plan without a rollout"
        )
    return [window if _ATTENTION[kind] else None for kind in kinds]


def held_bytes(model: nn.Module) -> int:
    """GPU memory of a model's weights on this rank, and of the buffers that others' are brought
    to."""
    parts = {id(m.part): m for m in model.modules() if isinstance(m, Sharded)}.values()
    pieces = [m.layout.piece_bytes(m.part.shape[1]) for m in parts]
    held = sum(tensor.nbytes for m in parts for tensor in m.held)
    own = sum(p.nbytes for p in model.parameters()) - held_on_host(model)
    return own + held + 2 * max(pieces, default=0)


def training_bytes(model: nn.Module, state_shards: int = 1) -> tuple[int, int]:
    """What stays on this rank of a model that AdamW trains: its weights and the optimizer's states,
    which ``state_shards`` ranks share."""
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return held_bytes(model), _ADAM_STATES * trained // state_shards


@dataclass(frozen=True, slots=True)
class RolloutMemory:
    """Memory of the device while completions are drawn; sizes in bytes."""

    weights: int  # the trainer's, which the engine shares, its adapter among them
    states: int  # of the optimizer, which stay
    engine: int  # what the engine keeps beside, asleep or awake
    sequence: int  # of one sequence's KV cache
    asked: int  # sequences that were asked for at once
    available: int  # what all of it may take

    @classmethod
    def of(
        cls,
        model: nn.Module,
        tokens: int,
        asked: int,
        *,
        available: int,
        engine: int = 0,
        dtype: torch.dtype | None = None,
        state_shards: int = 1,
    ) -> RolloutMemory:
        """For a Hugging Face model, bare or with an adapter, whose trained weights AdamW updates.
        ``tokens`` of the longest sequence, prompt and completion; ``dtype`` of the cache (None: the
        weights'); ``state_shards`` ranks share the optimizer's states."""
        language_model: Any = model
        dtype = dtype or dtype_of(language_model.get_input_embeddings())
        cache = KvCache.of(language_model.config, dtype.itemsize)
        weights, states = training_bytes(model, state_shards)
        return cls(weights, states, engine, cache.sequence_bytes(tokens), asked, available)

    @property
    def most(self) -> int:
        """The number of sequences that fit at once."""
        stays = self.weights + self.states + self.engine
        return max(0, self.available - stays) // self.sequence

    @property
    def sequences(self) -> int:
        """How many are drawn at once; the others wait for their turn."""
        return min(self.asked, self.most)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the whole KV cache."""
        return self.sequences * self.sequence

    @property
    def parts(self) -> dict[str, int]:
        """What memory is for -> bytes."""
        stays = {"weights and states": self.weights + self.states, "engine": self.engine}
        return {**stays, "KV cache": self.kv_bytes}
