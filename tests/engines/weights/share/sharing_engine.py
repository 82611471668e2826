"""A real vLLM whose weights a trainer shares and updates; prints what happened as JSON.

A process of its own (one engine per process):
``python tests/engines/weights/share/sharing_engine.py FOLDER``.
On the CPU vLLM's packing for CPU kernels is off, as it is on a GPU; LoRA is on, so that layers are
wrapped. On a GPU in bf16, with ``--quantization fp8_per_channel`` or another as well.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[4]))
from tests.engines.weights.share.sharing_sweep import ENVIRONMENT, KINDS, SIZES, keep

PROMPTS = [[5, 17, 99, 23], [200, 7, 41], [3, 3, 3, 250, 120]]
NUM_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--quantization")
    parser.add_argument("--hidden", type=int, default=SIZES["hidden_size"])
    arguments = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # before vLLM is imported
    warnings.simplefilter("ignore")
    import torch
    import transformers
    import vllm
    import vllm.model_executor.layers.utils as layer_utils

    from fxrl.engines.weights.share.binder import share

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    dtype = torch.bfloat16 if on_gpu or arguments.quantization else torch.float32
    layer_utils.dispatch_cpu_unquantized_gemm = keep
    sizes = {"hidden_size": arguments.hidden, "intermediate_size": 2 * arguments.hidden}
    config = transformers.AutoConfig.for_model("qwen3", **SIZES | KINDS["qwen3"] | sizes)
    torch.manual_seed(0)
    trained = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    trained.save_pretrained(arguments.folder)
    llm = vllm.LLM(
        arguments.folder,
        dtype=str(dtype).removeprefix("torch."),
        quantization=arguments.quantization,
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_lora=arguments.quantization is None,
        distributed_executor_backend="uni",
        max_model_len=64,
        # A cache of given size: vLLM then measures no free memory, which others may be changing.
        **({"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2**30} if on_gpu else {}),
    )
    inside = llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
    model, report = share(inside, arguments.folder, dtype=dtype, device=device)
    facts: dict[str, Any] = {
        "complete": report.complete,
        "report": str(report),
        "wrapped": any(".base_layer." in row.vllm_name for row in report.rows),
        "before": generate(llm, model),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([PROMPTS[0] + facts["before"]["tokens"][0]], device=device)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    llm.reset_prefix_cache()
    report.verify_again()
    facts["after"] = generate(llm, model)
    print(json.dumps(facts), flush=True)


def generate(llm: Any, model: Any) -> dict[str, Any]:
    """Greedy tokens, vLLM's log-probs of them, and how far the trainer's are from those."""
    import torch
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    tokens, logprobs, drift = [], [], 0.0
    for prompt, output in zip(PROMPTS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        (best,) = output.outputs
        drawn = list(best.token_ids)
        rows = zip(best.logprobs, drawn, strict=True)
        theirs = torch.tensor([row[token].logprob for row, token in rows])
        whole = torch.tensor([prompt + drawn], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].float().cpu()
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(drawn)[:, None])[:, 0]
        tokens.append(drawn)
        logprobs.append(theirs.tolist())
        drift = max(drift, float((ours - theirs).abs().max()))
    return {"tokens": tokens, "logprobs": logprobs, "drift": drift}


if __name__ == "__main__":
    main()
