"""Which architectures share all their weights with a real vLLM.

One process: vLLM's model classes are instantiated and loaded by vLLM's own loader, one after the
other, without an engine. Prints one JSON line for each architecture. ``test_share_vllm`` runs it
for a few; by hand: ``python tests/engines/weights/share/sharing_sweep.py all``. A kind's suffix
only tells variants apart, but ``-packed``: there vLLM packs the weights for its CPU kernels, as it
does unasked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # where it is not installed vLLM does not look
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
SIZES = {
    "vocab_size": 330,  # not a multiple of 64: vLLM pads
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
    "first_k_dense_replace": 99,
    "num_key_value_heads": 4, "moe_intermediate_size": 64,
}  # fmt: skip
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "phi3": {},
    "llama": {},
    "qwen2": {},
    "mistral": {},
    "ministral": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "granite": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {},
    "cohere": {},
    "cohere2": {},
    "phi": {},
    "stablelm": {},
    "starcoder2": {"num_key_value_heads": 2},
    "gpt2": {},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 16},
    "opt": {"ffn_dim": 192, "word_embed_proj_dim": 128},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    "bloom": {},
    "glm": {},
    "glm4": {},
    "exaone4": {},
    "nemotron": {},
    "arcee": {},
    "apertus": {},
    "seed_oss": {},
    "hunyuan_v1_dense": {},
    "ernie4_5": {},
    "helium": {},
    "qwen3-packed": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "mixtral": MOE,
    "qwen3_moe": MOE | {"moe_intermediate_size": 64},
    "olmoe": MOE,
    "gpt_oss": MOE | ROPE,
    "deepseek_v2": MLA,
}


def main(kinds: list[str]) -> None:
    os.environ.update(ENVIRONMENT)  # before vLLM is imported
    warnings.simplefilter("ignore")
    import torch
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry

    pack = layer_utils.dispatch_cpu_unquantized_gemm
    torch.accelerator.empty_cache = lambda: None  # the loader calls it on a machine without one
    # vLLM asks a class in a process that imports all anew, for seconds; here it is loaded anyhow.
    registry._run_in_subprocess = lambda ask: ask()
    initialized = False
    for kind in kinds:
        # On a GPU nothing is packed; there the weights stay as they are.
        layer_utils.dispatch_cpu_unquantized_gemm = pack if "-packed" in kind else keep
        with tempfile.TemporaryDirectory() as folder:
            try:
                config = engine_config(kind, Path(folder))
                if not initialized:
                    from vllm.config import set_current_vllm_config

                    with set_current_vllm_config(config):
                        rendezvous = f"file://{tempfile.mktemp()}"
                        init_distributed_environment(1, 0, rendezvous, 0, "gloo")
                        initialize_model_parallel(1, 1)
                    initialized = True
                line = sharing(kind, Path(folder), config)
            except Exception as error:
                line = {"kind": kind, "error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(line), flush=True)


def keep(layer: Any, remove_weight: bool) -> None:
    """In place of packing: multiply with the weight itself."""
    import torch

    layer.cpu_linear = torch.nn.functional.linear


def engine_config(kind: str, folder: Path) -> Any:
    """Writes a random checkpoint and returns the ``VllmConfig`` that loads it."""
    import torch
    import transformers
    from vllm.engine.arg_utils import EngineArgs

    sizes = {name: value for name, value in (SIZES | KINDS[kind]).items() if value is not None}
    config = transformers.AutoConfig.for_model(kind.partition("-")[0], **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for value in model.parameters():  # norms and biases too: constants prove nothing
            value.add_(torch.randn_like(value) * 0.1)
    model.save_pretrained(folder)
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        distributed_executor_backend="uni",
        max_model_len=128,
    ).create_engine_config()


def sharing(kind: str, folder: Path, config: Any) -> dict[str, Any]:
    """Loads with vLLM, shares, and compares with transformers' own loading."""
    import torch
    import transformers
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    from fxrl.engines.weights.share.binder import share

    with set_current_vllm_config(config):
        vllm_model = get_model(vllm_config=config)
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    building = set_current_vllm_config(config)
    model, report = share(vllm_model, folder, device="cpu", building=building)
    report.verify_again()
    ids = torch.randint(3, 300, (2, 17))
    with torch.no_grad():
        equal = torch.equal(model(ids).logits, plain(ids).logits)
    copied = [row for row in report.rows if not row.shared]
    return {
        "kind": kind,
        "vllm_class": type(vllm_model).__name__,
        "shared": len(report.rows) - len(copied),
        "copied": len(copied),
        "complete": report.complete,
        "plain_parameters": all(type(p) is torch.nn.Parameter for p in model.parameters()),
        "logits_equal": equal,
        "how": sorted({row.reason for row in report.rows if row.shared}),
        "why": sorted({f"{row.name}: {row.reason}" for row in copied})[:2],
        "warnings": list(report.warnings),
    }


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[4]))
    if sys.argv[1:] == [
        "all"
    ]:  # vLLM makes its expert-parallel group with the first model or never
        experts = [kind for kind in KINDS if "num_experts_per_tok" in KINDS[kind]]
        for group in ([kind for kind in KINDS if kind not in experts], experts):
            subprocess.run([sys.executable, __file__, *group], check=True)
    else:
        main(sys.argv[1:])
