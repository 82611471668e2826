"""TRL's own trainers beside fxrl's classes over them: time, memory and loss curve of a step.

Three kinds of training, the same model, texts, seed and options for every variant; each runs in a
process of its own, so none inherits memory or compiled kernels:

    trl          ``SFTTrainer``, ``DPOTrainer``, ``GRPOTrainer`` with gradient checkpointing
    trl-liger    the same with ``use_liger_kernel=True``
    trl-fp32     TRL's with the same weights in float32: what training in bf16 should come near to
    fxrl         ``FxrlSFTTrainer``, ... of fxrl.integrations.trl, with all the memory there is
    fxrl:SIZE    the same with ``fxrl.Config(gpu_memory=SIZE)``

A step is all that a trainer does in it: fetching rows, loss, backward, optimizer. GRPO's
completions come from a ``rollout_func`` that draws letters, so that no generation is timed. Weights
are random, at the exact shape; texts are letters, a token each, no two of them equally often, so
that there is something to learn. ``curve`` is the logged metric that is compared between variants:
the loss, but entropy for GRPO, whose loss is 0 at every first use of its completions.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from bench.lib import common, qwen
from bench.lib.child import measured

COLUMNS = (
    "kind",
    "variant",
    "layers",
    "tokens",
    "first_step_s",
    "step_ms",
    "step_ms_min",
    "step_ms_max",
    "peak_gib",
    "first_peak_gib",
    "curve",
    "curve_first",
    "curve_last",
    "curve_difference",
    "curve_to_fp32",
    "missed",
    "error",
)
CURVES = {"sft": "loss", "dpo": "loss", "grpo": "entropy"}
MARK = "BENCH "
PROMPT = "Prompt {:>8}: "
_LOGGED = ("loss", "entropy", "grad_norm")
_QUIET = {"CI": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if fxrl failed in one of the rows, else 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _arguments(words)
    if args.worker:
        print(MARK + json.dumps(_work(args)), flush=True)
        return 0
    notes = [
        f"{args.shape} shape, random weights, bf16, LoRA r={args.rank} on all linear layers, "
        f"attention: sdpa; rows of {args.length} tokens, prompt and completion together; learning "
        "rates and all that is not said here: TRL's defaults",
        f"times: median, least and most of the steps after the first {args.skip} of {args.steps}; "
        "first_step_s compiles; peaks: of PyTorch's allocator, model and optimizer included, in "
        "the timed steps and in those before",
        "curve_difference: the largest distance to trl's curve at any step, curve_to_fp32: to "
        "trl-fp32's, which has the same weights in float32",
        "trl's own losses are computed in chunks of tokens (its fused head); missed: rewrites that "
        "fxrl found no way for",
    ]
    results = common.results(args, "TRL's trainers and fxrl's over them", COLUMNS, notes)
    results.extra |= {"curves": {}, "reports": {}}
    for kind in args.kinds:
        for variant in args.variants:
            command = [sys.executable, "-m", "bench.trl_step", *words]
            found = measured(
                [*command, "--worker", f"{kind}/{variant}"],
                MARK,
                environment=os.environ | _QUIET | _one_gpu(),
                limit_s=args.time_limit,
            )
            _add(results, kind, variant, found)
    results.finish()
    return int(results.failed("fxrl"))


def _one_gpu() -> dict[str, str]:
    """With more than one in sight, transformers would put the model into ``nn.DataParallel``."""
    return {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def _add(results: common.Results, kind: str, variant: str, found: dict[str, Any]) -> None:
    """One row out of what a worker says; its curves go beside the rows."""
    curves = results.extra["curves"].setdefault(kind, {})
    row: dict[str, Any] = found
    if "curves" in found:
        curves[variant] = found.pop("curves")
        if report := found.pop("report", None):
            results.extra["reports"][f"{kind}/{variant}"] = report
        curve = curves[variant][CURVES[kind]]
        row |= {"curve": CURVES[kind], "curve_first": curve[0], "curve_last": curve[-1]}
        for column, other in (("curve_difference", "trl"), ("curve_to_fp32", "trl-fp32")):
            if variant != other and other in curves:
                pairs = zip(curve, curves[other][CURVES[kind]], strict=True)
                row[column] = max(abs(a - b) for a, b in pairs)
    results.add(kind=kind, variant=variant, **row)


# -- one variant, in its own process


def _work(args: argparse.Namespace) -> dict[str, Any]:
    """Its row, curves and report; an error is a result too."""
    kind, _, variant = args.worker.partition("/")
    try:
        return train(args, kind, variant)
    except Exception as error:
        traceback.print_exc()
        return {"error": common.error_text(error)}


def train(args: argparse.Namespace, kind: str, variant: str) -> dict[str, Any]:
    """Trains for ``args.steps`` steps.

    Args:
        kind: sft, dpo or grpo.
        variant: as in the module's text.

    Returns:
        Columns of its row, ``curves`` {metric: [steps]}, and fxrl's ``report``.
    """
    with tempfile.TemporaryDirectory(prefix="fxrl-trl-step-") as folder:
        trainer = make_trainer(args, kind, variant, folder)
        clock = _clock(args)
        trainer.add_callback(clock)
        trainer.train()
    timed = clock.seconds[args.skip :]
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    names = [name for name in _LOGGED if name in logged[0]]
    found: dict[str, Any] = {
        "layers": trainer.model.config.num_hidden_layers,
        "tokens": round(logged[-1]["num_tokens"] / args.steps),
        "first_step_s": clock.seconds[0],
        "step_ms": statistics.median(timed) * 1e3,
        "step_ms_min": min(timed) * 1e3,
        "step_ms_max": max(timed) * 1e3,
        "peak_gib": common.gib(clock.peaks[-1]),
        "first_peak_gib": common.gib(clock.peaks[0]),
        "curves": {name: [line[name] for line in logged] for name in names},
    }
    if variant.startswith("fxrl"):
        report = trainer.train_step.report
        found |= {
            "missed": len(report.of_kind("missed")),
            "report": [str(remark) for remark in report.remarks],
        }
    return found


def make_trainer(args: argparse.Namespace, kind: str, variant: str, folder: str) -> Any:
    """A trainer over a new model, configured as one would for TRL."""
    import trl
    from peft import LoraConfig

    import fxrl
    from fxrl.models.tiny import tiny_tokenizer

    name, _, memory = variant.partition(":")
    rows = args.tokens // args.length
    options: dict[str, Any] = {
        "per_device_train_batch_size": rows // 2 if kind == "dpo" else rows,
        "max_steps": args.steps,
        "gradient_checkpointing": True,
        "bf16": name != "trl-fp32",
        "use_liger_kernel": name == "trl-liger",
        "use_cpu": args.device == "cpu",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    if kind == "grpo":
        options |= {"num_generations": rows, "max_completion_length": args.length, "beta": 0.0}
    else:
        options["max_length"] = args.length
    given: dict[str, Any] = {}
    home: Any = trl
    prefix = ""
    if name == "fxrl":
        from fxrl.integrations import trl as home

        prefix = "Fxrl"
        given["config"] = fxrl.Config(min_saved_bytes=0, gpu_memory=memory or None)
    if kind == "grpo":
        given |= {"reward_funcs": _reward, "rollout_func": _rollout(args.length)}
    model = qwen.make_model(
        args.shape, args.device, layers=args.layers, rank=0, checkpointing=False
    )
    if name == "trl-fp32":
        model = model.float()
    torch.manual_seed(0)  # LoRA's factors
    return getattr(home, f"{prefix}{kind.upper()}Trainer")(
        model=model,
        args=getattr(trl, f"{kind.upper()}Config")(folder, **options),
        train_dataset=_texts(kind, rows * args.steps, args.length),
        processing_class=tiny_tokenizer(),
        peft_config=LoraConfig(
            r=args.rank, lora_alpha=args.rank, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        **given,
    )


def _clock(args: argparse.Namespace) -> Any:
    """A callback that keeps ``seconds`` of each step, ``peaks`` before and in the timed ones."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.peaks: list[int | None] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            common.synchronize(args.device)
            self.begun = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            common.synchronize(args.device)
            self.seconds.append(time.perf_counter() - self.begun)
            if len(self.seconds) in (args.skip, args.steps):
                cuda = args.device == "cuda"
                self.peaks.append(torch.cuda.max_memory_allocated() if cuda else None)
                if cuda:
                    torch.cuda.reset_peak_memory_stats()

    return Clock()


# -- texts: a letter is a token


def _letters(draw: random.Random, count: int, often: str = "etaoin") -> str:
    weights = [8 if letter in often else 1 for letter in string.ascii_lowercase]
    return "".join(draw.choices(string.ascii_lowercase, weights, k=count))


def _texts(kind: str, count: int, length: int) -> Any:
    """Rows of ``length`` tokens, the last of which is the end's that TRL adds."""
    from datasets import Dataset

    draw = random.Random(0)
    room = length - 1 - len(PROMPT.format(0))
    rows = []
    for number in range(count):
        row = {"prompt": PROMPT.format(number)}
        if kind == "sft":
            row = {"text": _letters(draw, length - 1)}
        elif kind == "dpo":
            row["chosen"] = _letters(draw, room)
            row["rejected"] = _letters(draw, room, "zqxjkv")
        rows.append(row)
    return Dataset.from_list(rows)


def _rollout(length: int) -> Any:
    """TRL's ``rollout_func``: the same completions for the same prompt, whatever the policy."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        asked = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        drawn = [
            _letters(random.Random(f"{prompt}{number}"), length - len(ids))
            for number, (prompt, ids) in enumerate(zip(prompts, asked, strict=True))
        ]
        return {
            "prompt_ids": asked,
            "completion_ids": tokenizer(drawn)["input_ids"],
            "logprobs": None,
        }

    return rollout


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [text.count("e") / len(text) for text in completions]


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--kinds", default="sft,dpo,grpo", type=common.words, metavar="A,B")
    parser.add_argument("--variants", default="trl,fxrl", type=common.words, metavar="A,B")
    gpu = torch.cuda.is_available()
    shape = "qwen3-8b" if gpu else "tiny"
    tokens, length = (16384, 2048) if gpu else (256, 64)
    parser.add_argument("--shape", default=shape, choices=sorted(qwen.SHAPES))
    parser.add_argument("--layers", type=common.positive, help="the shape's own by default")
    parser.add_argument("--rank", type=common.positive, default=32)
    parser.add_argument("--tokens", type=common.positive, default=tokens, help="of a step")
    parser.add_argument("--length", type=common.positive, default=length, help="tokens of a row")
    parser.add_argument("--steps", type=common.positive, default=8)
    parser.add_argument("--skip", type=common.positive, default=2, help="steps that are warm-up")
    parser.add_argument("--time-limit", type=float, default=240, help="seconds for each row")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if unknown := set(args.kinds) - CURVES.keys():
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; there are {', '.join(CURVES)}")
    names = {variant.partition(":")[0] for variant in args.variants}
    if unknown := names - {"trl", "trl-liger", "trl-fp32", "fxrl"}:
        parser.error(f"--variants has {', '.join(sorted(unknown))}; see --help")
    if args.tokens % (2 * args.length):
        parser.error(f"--tokens {args.tokens} is no even number of rows of --length {args.length}")
    if args.skip >= args.steps:
        parser.error(f"--skip {args.skip} leaves none of --steps {args.steps}")
    return args


if __name__ == "__main__":
    sys.exit(main())
