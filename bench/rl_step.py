"""One GRPO step with rollouts, end to end: fxrl, TRL and vLLM alone, on the same job in one run.

The job: a Qwen3 (``--shape``) with random weights, LoRA r=32 on all linear layers, 4 prompts x 8
completions of exactly 2048 tokens (EOS is ignored), DAPO's loss. Every variant runs in a process of
its own on the same GPU, so none inherits memory or compiled kernels:

    plain       vLLM alone generates the tokens; no adapter, nothing is trained
    plain-lora  the same through vLLM's LoRA kernels
    fxrl        ``fxrl train`` with engine = "vllm"
    fxrl-fp8-rollouts  vLLM's weights in FP8, which are the trainer's; its products run in bf16
    fxrl-fp8    the same, and the trainer multiplies in FP8 too
    fxrl-held-fp8  fxrl's own engine; all that is frozen is held in FP8 alone, the embeddings too
    fxrl-held-nf4  likewise in NF4
    trl         TRL's GRPOTrainer with vLLM colocated and put to sleep

``--card 5`` leaves the allocator of fxrl's variants 5 GiB of the GPU, as a small card would. That
bounds all of a run without vLLM, whose KV cache is its own; the CUDA context comes on top.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.lib import common, rl_job
from bench.lib.child import measured, tell

COLUMNS = (
    "variant",
    "step_s",
    "step_s_min",
    "generate_s",
    "rest_s",
    "sync_s",
    "release_s",
    "wake_s",
    "reward_s",
    "score_s",
    "train_s",
    "other_s",
    "decode_step_ms",
    "peak_gib",
    "reserved_gib",
    "drift_mean",
    "init_s",
    "first_step_s",
    "error",
)
_FP8_ROLLOUTS = ("vllm.quantization=fp8",)
_HELD = 'model.quantization={{format="{}", embeddings=true, head=true}}'
FXRL = {
    "fxrl": (),
    "fxrl-fp8-rollouts": _FP8_ROLLOUTS,
    "fxrl-fp8": (*_FP8_ROLLOUTS, "fxrl.precision=fp8"),
    "fxrl-held-fp8": ("engine=torch", _HELD.format("fp8"), "fxrl.precision=fp8"),
    "fxrl-held-nf4": ("engine=torch", _HELD.format("nf4")),
}
"""What of ``fxrl train``'s configuration each variant changes."""


def main() -> int:
    """Measures; 1 if a variant failed."""
    args = _arguments()
    if args.worker:
        _work(args)
        return 0
    notes = [
        f"{rl_job.PROMPTS} prompts x {rl_job.GENERATIONS} completions x {args.length} tokens, "
        f"{args.shape} shape, random weights, LoRA r={rl_job.RANK} on all linear layers, DAPO",
        f"medians over the steps after the first {args.skip}; rest_s = step_s - generate_s",
        "peak: memory of the whole GPU (driver), sampled every 20 ms; reserved: of the allocator, "
        f"at its height; card: {args.card or 'all'} GiB",
    ]
    results = common.results(args, "GRPO step with rollouts", COLUMNS, notes)
    folder = Path(args.work)
    rl_job.make_model(folder, args.shape)
    for variant in args.variants:
        found = _measure(args, variant)
        if theirs := found.pop("versions", None):
            named = ", ".join(f"{name} {version}" for name, version in theirs.items())
            results.note(f"{variant} ran with {named}")
        results.add(variant=variant, **found)
    results.finish()
    return int(results.failed())


def _measure(args: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Runs one variant in a process of its own."""
    words = ["-m", "bench.rl_step", "--worker", variant, "--work", args.work]
    words += ["--length", str(args.length), "--steps", str(args.steps), "--skip", str(args.skip)]
    words += ["--shape", args.shape, *args.override]
    words += ["--card", str(args.card)] if args.card else []
    environment = dict(os.environ)
    if variant == "trl" and args.peers:
        environment["PYTHONPATH"] = f"{args.peers}:{environment.get('PYTHONPATH', '')}"
    with rl_job.PeakMemory() as peak:
        found = measured(words, environment=environment, limit_s=args.time_limit)
    return found if "error" in found else found | {"peak_gib": peak.gib}


def _work(args: argparse.Namespace) -> None:
    runs = {"plain": _plain, "plain-lora": _plain, "trl": _trl} | dict.fromkeys(FXRL, _fxrl)
    tell(runs[args.worker](args))


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    """vLLM as its documentation says; the tokens of one step."""
    os.environ |= rl_job.VLLM_ENVIRONMENT
    import torch
    from vllm import LLM, SamplingParams

    start = time.perf_counter()
    lora: dict[str, Any] = {}
    request = None
    if args.worker == "plain-lora":
        from vllm.lora.request import LoRARequest

        adapter = rl_job.make_adapter(Path(args.work), args.shape)
        lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rl_job.RANK}
        request = LoRARequest("adapter", 1, str(adapter))
    engine = LLM(
        str(rl_job.model_path(Path(args.work), args.shape)),
        dtype="bfloat16",
        max_model_len=args.length + 128,
        max_num_seqs=256,
        gpu_memory_utilization=0.4,
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",
        seed=0,
        **lora,
    )
    init = time.perf_counter() - start
    params = SamplingParams(
        max_tokens=args.length, temperature=1.0, logprobs=0, ignore_eos=True, detokenize=False
    )
    prompts = [p for p in rl_job.questions(rl_job.PROMPTS) for _ in range(rl_job.GENERATIONS)]
    times = []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False, lora_request=request)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    generate = statistics.median(times[args.skip :])
    return {
        "step_s": generate,
        "step_s_min": min(times),
        "generate_s": generate,
        "decode_step_ms": generate / args.length * 1e3,
        "init_s": init,
    }


def _fxrl(args: argparse.Namespace) -> dict[str, Any]:
    """``fxrl train``; the times are those that it writes into metrics.jsonl."""
    import torch

    from fxrl.rl.train import main as train

    common.limit_memory(args.card)
    folder = Path(args.work)
    run_dir = folder / f"fxrl-{os.getpid()}"
    config = rl_job.write_config(
        folder, run_dir, length=args.length, steps=args.steps, shape=args.shape
    )
    start = time.perf_counter()
    code = train(str(config), [*FXRL[args.worker], *args.overrides])
    total = time.perf_counter() - start
    if code:
        raise SystemExit(f"fxrl train: exit code {code}")
    records = rl_job.steps_of(run_dir)
    measured = records[args.skip :]

    def middle(key: str) -> float | None:
        values = [r[key] for r in measured if r.get(key) is not None]
        return statistics.median(values) if values else None

    names = ("generate", "sync", "release", "wake", "reward", "score", "train", "other")
    step, generate = middle("step_time"), middle("time/generate")
    assert step is not None
    assert generate is not None
    return {f"{name}_s": middle(f"time/{name}") for name in names} | {
        "step_s": step,
        "step_s_min": min(r["step_time"] for r in measured),
        "rest_s": step - generate,
        "decode_step_ms": generate / args.length * 1e3,
        "reserved_gib": common.gib(torch.cuda.max_memory_reserved() or None),
        "drift_mean": middle("sampling/sampling_logp_difference/mean"),
        "init_s": total - sum(r["step_time"] for r in records),
        "first_step_s": records[0]["step_time"],
    }


def _trl(args: argparse.Namespace) -> dict[str, Any]:
    """TRL's GRPOTrainer as a user would configure it for this job."""
    os.environ |= rl_job.VLLM_ENVIRONMENT | rl_job.TORCHRUN_ENVIRONMENT
    import random

    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps: list[float] = []
    logged: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            steps.append(time.perf_counter() - self.begun)

        def on_log(self, *_: Any, logs: dict[str, float] | None = None, **__: Any) -> None:
            logged.append(dict(logs or {}))

    questions = [{"prompt": text} for text in rl_job.questions(512)]
    config = GRPOConfig(
        output_dir=str(Path(args.work) / "trl"),
        per_device_train_batch_size=rl_job.GENERATIONS,
        gradient_accumulation_steps=rl_job.PROMPTS,
        num_generations=rl_job.GENERATIONS,
        max_completion_length=args.length,
        max_steps=args.steps,
        logging_steps=1,
        report_to=[],
        bf16=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.4,
        vllm_enable_sleep_mode=True,
        vllm_max_model_length=args.length + 128,
        beta=0.0,
        gradient_checkpointing=True,
        learning_rate=1e-5,
        save_strategy="no",
        temperature=1.0,
        generation_kwargs={"ignore_eos": True},
        loss_type="dapo",
        model_init_kwargs={"dtype": "bfloat16"},  # as fxrl's; by itself it loads float32 weights
    )
    start = time.perf_counter()
    trainer = GRPOTrainer(
        model=str(rl_job.model_path(Path(args.work), args.shape)),
        reward_funcs=lambda completions, **_: [random.random() for _ in completions],
        args=config,
        train_dataset=Dataset.from_list(questions),
        peft_config=LoraConfig(
            r=rl_job.RANK,
            lora_alpha=rl_job.RANK,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        ),
    )
    init = time.perf_counter() - start
    trainer.add_callback(Clock())
    trainer.train()
    drift = [
        log["sampling/sampling_logp_difference/mean"]
        for log in logged[args.skip :]
        if "sampling/sampling_logp_difference/mean" in log
    ]
    return {
        "step_s": statistics.median(steps[args.skip :]),
        "step_s_min": min(steps),
        "drift_mean": statistics.median(drift) if drift else None,
        "init_s": init,
        "versions": common.versions(),  # --peers may bring others than the parent has
    }


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--variants", default="plain,fxrl,trl", type=common.words, metavar="A,B")
    shapes = ("qwen3-1.7b", "qwen3-8b", "qwen2.5-1.5b", "tiny")
    parser.add_argument("--shape", default=rl_job.SHAPE, choices=shapes)
    parser.add_argument("--length", type=int, default=2048, help="tokens of each completion")
    parser.add_argument("--card", type=float, help="GiB that fxrl's allocator may have")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--skip", type=int, default=1, help="steps that are warm-up")
    parser.add_argument("--work", default="/tmp/fxrl-rl-step", help="folder for model and runs")
    parser.add_argument("--peers", help="folder with TRL, put on its PYTHONPATH")
    parser.add_argument("--override", action="append", default=[], help="KEY=VALUE of fxrl train")
    parser.add_argument("--time-limit", type=float, default=420, help="seconds for each variant")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
