"""A real vLLM on the CPU whose weights a trainer shares and updates; prints what happened as JSON.

A process of its own (one engine per process): ``python tests/runtime/sharing_engine.py FOLDER``.
vLLM's packing for CPU kernels is off, as on a GPU; LoRA is on, so that layers are wrapped.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.runtime.sharing_sweep import ENVIRONMENT, KINDS, SIZES, keep

PROMPTS = [[5, 17, 99, 23], [200, 7, 41], [3, 3, 3, 250, 120]]
NUM_TOKENS = 8


def main(folder: str) -> None:
    os.environ.update(ENVIRONMENT)  # before vLLM is imported
    warnings.simplefilter("ignore")
    import torch
    import transformers
    import vllm
    import vllm.model_executor.layers.utils as layer_utils

    from fxrl.runtime.shared_weights import share

    layer_utils.dispatch_cpu_unquantized_gemm = keep
    config = transformers.AutoConfig.for_model("qwen3", **SIZES | KINDS["qwen3"])
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    llm = vllm.LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_lora=True,
        distributed_executor_backend="uni",
        max_model_len=64,
    )
    inside = llm.llm_engine.model_executor.driver_worker.worker.model_runner.model
    model, report = share(inside, None, folder, dtype=torch.float32, device="cpu")
    facts: dict[str, Any] = {
        "complete": report.complete,
        "report": str(report),
        "wrapped": any(".base_layer." in row.vllm_name for row in report.rows),
        "before": generate(llm, model),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.tensor([PROMPTS[0] + facts["before"]["tokens"][0]])
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
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(-1, torch.tensor(drawn)[:, None])[:, 0]
        tokens.append(drawn)
        logprobs.append(theirs.tolist())
        drift = max(drift, float((ours - theirs).abs().max()))
    return {"tokens": tokens, "logprobs": logprobs, "drift": drift}


if __name__ == "__main__":
    main(sys.argv[1])
