"""Models by id, path, configuration or kind; SmolLM2 without a hub; LoRA."""

from fxrl.errors import MissingPackageError
from fxrl.models.hf import FetchError, ModelError
from fxrl.models.host_embedding import HostEmbedding, offload_embeddings
from fxrl.models.load import build_from_config, load_model, load_tokenizer
from fxrl.models.lora import lora
from fxrl.models.quantized import Quantization, Quantized, QuantizedLinear, quantize
from fxrl.models.sharded import Sharded, ShardedLinear, shard
from fxrl.models.smollm2 import fetch_smollm2
from fxrl.models.tiny import TINY_KINDS, TinySize, tiny_config, tiny_tokenizer
from fxrl.ops.sharded import Peers

__all__ = [
    "TINY_KINDS",
    "FetchError",
    "HostEmbedding",
    "MissingPackageError",
    "ModelError",
    "Peers",
    "Quantization",
    "Quantized",
    "QuantizedLinear",
    "Sharded",
    "ShardedLinear",
    "TinySize",
    "build_from_config",
    "fetch_smollm2",
    "load_model",
    "load_tokenizer",
    "lora",
    "offload_embeddings",
    "quantize",
    "shard",
    "tiny_config",
    "tiny_tokenizer",
]
