"""Agreement: how far the log-probs that vLLM samples with are from the trainer's, and why.

A policy is compared with itself: tokens are drawn by vLLM (or at random), then every variant gives
its log-prob for the same tokens of the same bf16 weights. In fp32 both sides must agree to 1e-4
nat: then rope, norms, attention and scaling mean the same, and what differs in bf16 is rounding.
How large rounding is for these weights is seen without vLLM: Hugging Face in bf16 against itself in
fp32, and fp32 with the embeddings rounded to 9 bits (one unit in the last place of bf16), which
shows how the network amplifies a disturbance.

Models: ``random:LAYERS:HIDDEN:WEIGHT_STD:EMBED_STD`` (Qwen3, tied embeddings) or a folder.

NOTE [Why random weights disagree]
An early test on a random model of Qwen3-1.7B's shape saw 0.16 nat on average between vLLM and
Hugging Face, 1.3 at most. It is rounding, amplified by random weights; rope, norms, attention and
scaling agree. This file's figures, vLLM 0.32 on a CPU, every row with the same bf16 weights,
mean |d| in nat over 768 sampled tokens. The random models have that test's gain per layer (std
times sqrt(hidden) = 1.36) and logits (std 13.6); SmolLM2-135M answers chat questions:

    compared                                 2 layers   8 layers   28 layers   SmolLM2
    vLLM fp32   with HF fp32                  6e-7       7e-6       2e-5       5e-6
    HF bf16     with HF fp32                  0.003      0.058      0.16       0.029
    vLLM bf16   with HF fp32                  0.003      0.058      0.14       0.027
    vLLM bf16   with HF bf16                  0.003      0.073      0.20       0.036
    the same, the head in fp32 on both        0.003      0.077      0.20       0.024
    vLLM fp16   with HF fp16                  0.0005     0.010      0.022      0.004
    HF fp32, its embeddings off by 1 ulp      0.001      0.022      0.051      0.001

(1) In fp32 the two programs agree to 1e-5: both compute the same function. (2) In bf16 vLLM is as
far from the fp32 truth as Hugging Face is, and the two roundings add up; nothing is left to
explain. (3) Random layers amplify: one ulp of bf16 on the embeddings grows fifty-fold from 2 to 28
layers, and logits of std 13.6 turn 1 % into 0.14 nat. At the usual initialisation (std 0.02, 28
layers, hidden 256) the same comparison gives 0.004, and trained weights hardly amplify. (4) What a
trained model has left is local rounding. On SmolLM2, rounding one kind of value at a time: logits
0.017 (they are 16 to 32, so bf16 is off by up to 0.06), residual stream 0.009, norms 0.006, all
others below. Even two attention implementations of Hugging Face differ by 0.033 there in bf16.
So no engine agrees with bf16 to 0.01 nat on this model. The head in fp32 on both sides (fxrl's
fused head is; vLLM has ``head_dtype`` since 0.32) takes off a third, float16 with its 3 more bits
gets to 0.004 (as Qi et al. 2025, arXiv:2510.26788, found for training). (5) Where vLLM has weights
and rows in FP8, SmolLM2's trainer is 0.156 away with bf16 weights, 0.105 with the FP8 weights that
vLLM has, and 0.128 with rows in FP8 as well (2.6 % of rounding by the weights and as much by the
rows; of what both sides do, the weights' is the same, the rows' is not). vLLM 0.25 on an H200, over
4096 tokens, gives 0.154, 0.101 and 0.129.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.lib.child import measured, tell

COLUMNS = (
    "model",
    "compared",
    "with",
    "tokens",
    "mean_nat",
    "p99_nat",
    "max_nat",
    "logit_std",
    "mean_logp",
    "error",
)
# One engine in one process each: its dtype and whether the head's product stays in fp32.
ENGINES = {
    "vllm fp32": {"dtype": "float32"},
    "vllm bf16": {"dtype": "bfloat16"},
    "vllm bf16, fp32 head": {"dtype": "bfloat16", "fp32_head": True},
    "vllm fp16": {"dtype": "float16"},
    "vllm fp8": {"dtype": "bfloat16", "quantization": "fp8_per_channel"},
}
PAIRS = (
    ("hf bf16", "hf fp32"),
    ("hf bf16, fp32 head", "hf fp32"),
    ("hf fp32, 1 ulp", "hf fp32"),
    ("vllm fp32", "hf fp32"),
    ("vllm bf16", "hf fp32"),
    ("vllm bf16", "hf bf16"),
    ("vllm bf16", "hf bf16, fp32 head"),
    ("vllm bf16, fp32 head", "hf bf16, fp32 head"),
    ("vllm bf16, fp32 head", "hf fp32"),
    ("hf fp16", "hf fp32"),
    ("vllm fp16", "hf fp32"),
    ("vllm fp16", "hf fp16"),
    ("vllm fp8", "hf bf16"),
    ("vllm fp8", "fxrl bf16, fp8 weights"),
    ("vllm fp8", "fxrl bf16, fp8"),
)


def main() -> None:
    if "--child" in sys.argv:
        _sample(json.loads(Path(sys.argv[-1]).read_text()))
        return
    from bench.lib import common

    args = _arguments(common)
    notes = [
        "every variant has the same weights, rounded to bf16; tokens drawn at temperature 1",
        "fp32 head: the head's product of bf16 operands stays in fp32 and is not rounded to bf16",
        "1 ulp: embeddings of the fp32 model multiplied by 1 +- 2^-9 at random",
        "vllm fp8: weights by row and rows in FP8; fxrl fp8 weights: these widened, rows in bf16; "
        "fxrl fp8: rows in FP8, too",
    ]
    results = common.results(args, "Agreement of log-probs", COLUMNS, notes)
    for model in args.models:
        with tempfile.TemporaryDirectory(prefix="fxrl-agreement-") as folder:
            _compare(args, results, model, Path(folder))
    results.finish()


def _arguments(common: Any) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["random:28:256:0.03:0.3"])
    parser.add_argument("--engines", nargs="*", default=["vllm bf16"], choices=[*ENGINES])
    parser.add_argument("--prompts", type=int, default=8, help="number of prompts of 32 tokens")
    parser.add_argument("--tokens", type=int, default=32, help="drawn for each prompt")
    parser.add_argument("--eager", action="store_true", help="vLLM without CUDA graphs")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each engine")
    return parser.parse_args()


def _compare(args: argparse.Namespace, results: Any, model: str, folder: Path) -> None:
    path = _checkpoint(model, folder)
    prompts = _prompts(path, args.prompts)
    sampled: dict[str, dict[str, Any]] = {}
    for engine in args.engines:
        task = {"path": str(path), "prompts": prompts, "tokens": args.tokens, **ENGINES[engine]}
        found = _in_process(task | {"device": args.device, "eager": args.eager}, folder, args)
        if "error" in found:
            results.add(model=model, compared=engine, error=found["error"])
        else:
            sampled[engine] = found
    drawn = {engine: found["tokens"] for engine, found in sampled.items()}
    drawn = drawn or {"": _random_tokens(path, args.prompts, args.tokens)}
    for engine, tokens in drawn.items():
        reference = _Trainer(path, args.device, prompts, tokens)
        values = {name: reference.logps(name) for name in _Trainer.VARIANTS}
        if engine:
            values[engine] = [p for row in sampled[engine]["logps"] for p in row]
        for left, right in PAIRS:
            engine_pair = left.startswith("vllm")
            if left in values and right in values and (engine_pair or engine == next(iter(drawn))):
                results.add(
                    model=model,
                    compared=left,
                    **{"with": right},
                    **_difference(values[left], values[right]),
                    logit_std=reference.logit_std,
                )


def _difference(left: list[float], right: list[float]) -> dict[str, float]:
    gaps = sorted(abs(a - b) for a, b in zip(left, right, strict=True))
    return {
        "tokens": len(gaps),
        "mean_nat": sum(gaps) / len(gaps),
        "p99_nat": gaps[int(0.99 * (len(gaps) - 1))],
        "max_nat": gaps[-1],
        "mean_logp": sum(right) / len(right),
    }


class _Trainer:
    """Log-probs of given tokens under one checkpoint, by one full forward per sequence."""

    VARIANTS = (
        "hf fp32",
        "hf fp32, 1 ulp",
        "hf bf16",
        "hf bf16, fp32 head",
        "hf fp16",
        "fxrl bf16, fp8 weights",
        "fxrl bf16, fp8",
    )

    def __init__(
        self, path: Path, device: str, prompts: list[list[int]], tokens: list[list[int]]
    ) -> None:
        self._path, self._device = path, device
        self._prompts, self._tokens = prompts, tokens
        self.logit_std: float | None = None

    def logps(self, variant: str) -> list[float]:
        import torch

        score = self._scorer(variant)
        found: list[float] = []
        stds = []
        with torch.no_grad():
            for prompt, tokens in zip(self._prompts, self._tokens, strict=True):
                ids = torch.tensor([prompt + tokens], device=self._device)
                logps, std = (scored[0, len(prompt) - 1 :] for scored in score(ids))
                stds.append(float(std.mean()))
                found += logps.tolist()
        if variant == self.VARIANTS[0]:
            self.logit_std = sum(stds) / len(stds)
        return found

    def _scorer(self, variant: str) -> Callable[[Any], Any]:
        """From ids [1, T] to the log-probs [1, T - 1] of those behind the first, and the logits'
        standard deviations."""
        import torch
        from transformers import AutoModelForCausalLM

        dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        dtype = dtypes[variant.split(" ")[1].rstrip(",")]
        model = AutoModelForCausalLM.from_pretrained(self._path, dtype=dtype).to(self._device)
        model.eval().requires_grad_(False)
        if "1 ulp" in variant:
            model.get_input_embeddings().register_forward_hook(_disturb)
        if "fp32 head" in variant:
            # The input is bf16 numbers; only the product must not be rounded.
            head = model.get_output_embeddings()
            weight = head.weight.detach().float()
            head.forward = lambda hidden: torch.nn.functional.linear(hidden.float(), weight)
        if "fp8" in variant:
            import fxrl
            from fxrl.models import quantize

            quantize(model, "fp8")
            if "fp8 weights" not in variant:
                options = {"fp8-lora": {"only_faster": False}}
                config = fxrl.Config(
                    on_miss="error", min_saved_bytes=0, precision="fp8", pass_options=options
                )
                return fxrl.optimize(model, _score, config)
        return functools.partial(_score, model)


def _score(model: Any, ids: Any) -> Any:
    import torch

    logits = model(input_ids=ids).logits[:, :-1].float()
    logps = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return logps, logits.std(-1)


def _disturb(module: Any, inputs: Any, output: Any) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, output.shape, generator=generator) * 2 - 1
    return output * (1 + signs.to(output) * 2.0**-9)


def _checkpoint(model: str, folder: Path) -> Path:
    """The folder itself, or a new random one with weights that bf16 holds exactly."""
    if not model.startswith("random:"):
        return Path(model)
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers, hidden, weight_std, embed_std = model.split(":")[1:]
    width = int(hidden)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=int(layers),
        num_attention_heads=max(width // 128, 2),
        num_key_value_heads=max(width // 256, 1),
        head_dim=128 if width >= 256 else 64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    made = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, float(embed_std if "embed" in name else weight_std))
    made.to(torch.bfloat16).save_pretrained(folder / "model")
    return folder / "model"


def _prompts(path: Path, count: int) -> list[list[int]]:
    """Text where there is a tokenizer, else random tokens."""
    if (path / "tokenizer.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path)
        texts = [f"What is {7 * i + 3} + {11 * i + 8}? Explain each step." for i in range(count)]
        if tokenizer.chat_template:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
        return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    return _random_tokens(path, count, 32)


def _random_tokens(path: Path, count: int, length: int) -> list[list[int]]:
    import torch

    vocab = json.loads((path / "config.json").read_text())["vocab_size"]
    generator = torch.Generator().manual_seed(count * 1000 + length)
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()


def _in_process(task: dict[str, Any], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """vLLM in a process of its own, since it leaves memory and global state behind."""
    (folder / "task.json").write_text(json.dumps(task))
    from bench.lib.rl_job import VLLM_ENVIRONMENT

    settings = VLLM_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    settings |= {"TORCHDYNAMO_DISABLE": "1"} if task["device"] == "cpu" else {}
    words = ["-m", "bench.agreement", "--child", str(folder / "task.json")]
    return measured(words, environment=os.environ | settings, limit_s=args.timeout)


def _sample(task: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    on_cpu = task["device"] == "cpu"
    options: dict[str, Any] = {"distributed_executor_backend": "uni"} if on_cpu else {}
    if not on_cpu:
        options["gpu_memory_utilization"] = 0.5
    if task.get("fp32_head"):
        options["hf_overrides"] = {"head_dtype": "float32"}  # vLLM 0.32 and later
    llm = LLM(
        model=task["path"],
        skip_tokenizer_init=True,
        dtype=task["dtype"],
        quantization=task.get("quantization"),
        max_model_len=512,
        max_num_seqs=64,
        enforce_eager=on_cpu or task["eager"],
        logprobs_mode="processed_logprobs",
        seed=0,
        **options,
    )
    head = llm.llm_engine.vllm_config.model_config.head_dtype
    if task.get("fp32_head") and str(head) != "torch.float32":
        raise ValueError(f"this vLLM keeps its head in {head}: head_dtype needs 0.32")
    params = SamplingParams(
        temperature=1.0,
        # No min_tokens: it takes the end token out of the distribution, and its mass with it.
        max_tokens=task["tokens"],
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        seed=0,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    rows = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
    tokens = [list(row.token_ids) for row in rows]
    logps = [
        [places[token].logprob for places, token in zip(row.logprobs, row.token_ids, strict=True)]
        for row in rows
    ]
    tell({"tokens": tokens, "logps": logps})


if __name__ == "__main__":
    main()
