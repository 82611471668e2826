"""Decoding inside vLLM, in FP8 beside bf16: milliseconds a token step, by sequences at once.

fxrl's engine on a Qwen3 (``--shape``), weights drawn by vLLM (``load_format="dummy"``), one process
for each variant:

    bf16       an adapter folded in, or none: the engine sees no difference
    fp8        weights in FP8, no adapter; also what a folded one would take
    fp8-slots  the same with a LoRA adapter r=32 on all linear layers in vLLM's slots
    bf16-kv    bf16 weights, KV cache in FP8
    fp8-kv     both in FP8
    fp8-kv-vllm the same, read by vLLM's FlashAttention (``decode_attention="vllm"``)
    vllm-steps bf16, all of whose steps vLLM's own scheduler schedules (``decode_steps=False``)
    fp8-vllm   fp8 with layers as vLLM multiplies and compiles them (``decode_layers=False``)

Prompts have ``--prompt`` tokens, 8 completions each, EOS ends nothing. A step's time is the slope
between a short and a long call, so neither prefill nor a call's fixed costs are in it; the fastest
of ``--repeats``; ``over_bf16`` is how many times the tokens a second of the bf16 row of as many
sequences. A row is written as soon as it is measured. Without what vLLM has compiled before, an
engine of 36 layers takes two minutes on an H200 until it decodes; one of ``--layers 12`` shows a
layer's gain as well, beside a head, which stays in bf16, of three times the weight.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from bench.lib import common, qwen, rl_job
from bench.lib.child import measured, tell

COLUMNS = ("variant", "sequences", "step_ms", "tokens_per_s", "over_bf16", "build_s", "error")
_FP8: dict[str, Any] = {"quantization": "fp8_per_channel"}
_KV: dict[str, Any] = {"kv_cache_dtype": "fp8"}
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp8": _FP8,
    "fp8-kv": _FP8 | _KV,
    "fp8-kv-vllm": _FP8 | _KV | {"decode_attention": "vllm"},
    "fp8-slots": _FP8 | {"max_lora_rank": rl_job.RANK},
    "bf16-kv": _KV,
    "vllm-steps": {"decode_steps": False},
    "fp8-vllm": _FP8 | {"decode_layers": False},
}
"""What of the engine's options each variant changes."""
_SHORT = 16


def main() -> int:
    """Measures; 1 if a variant failed."""
    args = _arguments()
    if args.worker:
        _work(args)
        return 0
    notes = [
        f"{args.shape} shape, {args.layers or 'all'} layers, {args.prompt} prompt tokens and "
        f"{args.tokens} more, {rl_job.GENERATIONS} completions of each prompt",
        "step_ms: slope between calls of two lengths; no prefill, no training",
    ]
    results = common.results(args, "Decoding inside vLLM", COLUMNS, notes)
    rl_job.write_shape(args.work, args.shape, args.layers)
    bf16: dict[int, float] = {}
    for variant in args.variants:

        def add(row: dict[str, Any], variant: str = variant) -> None:
            count, speed = row["sequences"], row["tokens_per_s"]
            if variant == "bf16":
                bf16[count] = speed
            over = speed / bf16[count] if count in bf16 else None
            results.add(variant=variant, over_bf16=over, **row)

        found = measured(_words(args, variant), limit_s=args.time_limit, each=add)
        if "error" in found:
            results.add(variant=variant, error=found["error"])
    results.finish()
    return int(results.failed())


def _words(args: argparse.Namespace, variant: str) -> list[str]:
    """One variant in a process of its own."""
    words = ["-m", "bench.fp8_rollouts", "--worker", variant]
    for name in ("work", "prompt", "tokens", "repeats", "device"):
        words += [f"--{name}", str(getattr(args, name))]
    return [*words, "--sequences", ",".join(map(str, args.sequences))]


def _work(args: argparse.Namespace) -> None:
    """Tells a row for each number of sequences at once."""
    os.environ |= rl_job.VLLM_ENVIRONMENT
    start = time.perf_counter()
    engine = _engine(args)
    build_s = time.perf_counter() - start
    for count in args.sequences:
        ms = _step_ms(engine, count, args)
        row = {"sequences": count, "step_ms": ms, "tokens_per_s": count / ms * 1e3}
        tell(row | {"build_s": build_s})


def _engine(args: argparse.Namespace) -> Any:
    from fxrl.engines import VllmEngine, VllmOptions

    options = VllmOptions(
        max_model_len=args.prompt + _SHORT + args.tokens,
        max_num_seqs=max(args.sequences),
        max_num_batched_tokens=8192,
        compilation_config={"cudagraph_capture_sizes": sorted({1, *args.sequences})},
        engine_args={"load_format": "dummy"},
        **VARIANTS[args.worker],
    )
    engine = VllmEngine(args.work, options, eos_token_ids=())
    if options.max_lora_rank:
        engine.attach(_adapted(args), route="slots")
    return engine


def _adapted(args: argparse.Namespace) -> Any:
    """A model in which only the adapter, which is all that slots take, has values and memory."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from fxrl.models import lora

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config.from_pretrained(args.work))
        model = lora(model, rl_job.RANK, rl_job.RANK)
    model.to_empty(device="cpu")
    for name, module in model.named_modules():
        if name.endswith(("lora_A", "lora_B")):
            module.to_empty(device=args.device)
            for parameter in module.parameters():
                torch.nn.init.normal_(parameter, std=1e-2)
    return model


def _step_ms(engine: Any, count: int, args: argparse.Namespace) -> float:
    """Of a decode step of ``count`` sequences."""
    import torch

    from fxrl.engines import SamplingParams

    generator = torch.Generator().manual_seed(count)
    samples = min(rl_job.GENERATIONS, count)
    sizes = (count // samples, args.prompt)
    prompts = torch.randint(3, 1000, sizes, generator=generator).tolist()

    def seconds(tokens: int) -> float:
        params = SamplingParams(n=samples, max_tokens=tokens, ignore_eos=True)
        return common.wall_s(lambda: engine.generate(prompts, params), args.device)

    seconds(_SHORT)
    long, short = (
        min(seconds(tokens) for _ in range(args.repeats))
        for tokens in (_SHORT + args.tokens, _SHORT)
    )
    return (long - short) / args.tokens * 1e3


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--variants", default="bf16,fp8,bf16-kv,fp8-kv,fp8-slots", type=common.words, metavar="A,B"
    )
    shapes = [name for name in qwen.SHAPES if name in ("qwen3-1.7b", "qwen3-8b")]
    parser.add_argument("--shape", default="qwen3-8b", choices=shapes)
    count = common.positive
    parser.add_argument("--layers", type=count, help="fewer than the shape has")
    parser.add_argument("--sequences", default="32,128,256", type=common.numbers, metavar="N,M")
    parser.add_argument("--prompt", type=count, default=256)
    parser.add_argument("--tokens", type=count, default=256, help="decode steps that are timed")
    parser.add_argument("--repeats", type=count, default=2)
    parser.add_argument("--work", default="/tmp/fxrl-fp8-rollouts", help="folder of the model")
    parser.add_argument("--time-limit", type=float, default=420, help="seconds for each variant")
    parser.add_argument("--worker", choices=sorted(VARIANTS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
