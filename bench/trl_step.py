"""TRL's own trainers beside fxrl's: time, memory and loss curve of a step.

The same model, texts, seed and options for every variant of a kind of training; each runs in a
process of its own, so none inherits memory or compiled kernels:

    trl          TRL's trainer (``SFTTrainer``, ...) with gradient checkpointing
    trl-liger    the same with ``use_liger_kernel=True``
    trl-fp32     TRL's with the same weights in float32: what training in bf16 should come near to
    fxrl         with all the memory there is: of sft, dpo and grpo the classes over TRL's trainers
                 (``FxrlSFTTrainer``, ...), of kto, reward_model, ppo and distill ``fxrl train``
    fxrl:SIZE    the same with ``fxrl.Config(gpu_memory=SIZE)``
    eager        ``fxrl train`` with ``optimize=false``: the same loop around plain eager PyTorch;
                 measured in any case where TRL has no such trainer, which its row then says

A step is all that a trainer does in it: fetching rows, scoring by the reference or the value head,
loss, backward, optimizer. Completions of grpo, ppo and distill are drawn letters, so that no
generation is timed. Weights are random, at the exact shape; texts are letters, a token each, no two
of them equally often, so that there is something to learn. ``curve`` is the logged metric that is
compared between variants: the loss, but entropy for grpo, whose loss is 0 at every first use of its
completions.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from pathlib import Path
from typing import Any

import torch

import fxrl
from bench.lib import common, qwen
from bench.lib.child import measured, tell
from fxrl.ir.on_miss import open_misses

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
KINDS = ("sft", "dpo", "grpo", "kto", "reward_model", "ppo", "distill")
BY_TRL = {
    "sft": "SFT",
    "dpo": "DPO",
    "grpo": "GRPO",
    "kto": "KTO",
    "reward_model": "Reward",
    "distill": "Distillation",
}
"""What names TRL's trainer of a kind; it has no other."""
OVER_TRL = ("sft", "dpo", "grpo")
"""Kinds whose fxrl is a class over TRL's trainer; that of the others is ``fxrl train``."""
LOSSES: dict[str, dict[str, Any]] = {
    "kto": {"name": "kto", "beta": 0.1},
    "reward_model": {"name": "reward_model"},
    # No policy has drawn the letters, so there is nothing to correct for.
    "ppo": {"name": "ppo", "kl_coef": 0.05, "vllm_importance_sampling_correction": False},
    "distill": {"name": "distill", "beta": 0.0, "temperature": 1.0},
}
"""``[loss]`` of ``fxrl train``; TRL's trainers are given the same."""
LEARNING_RATE, SEED = 1e-5, 42
"""Of the kinds that are not over TRL's trainers, on both sides."""
PROMPT = "Prompt {:>8}: "
_LOGGED = ("loss", "entropy", "grad_norm")
_QUIET = {"CI": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures; 1 if fxrl failed in one of the rows, else 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _arguments(words)
    if args.worker:
        tell(_work(args))
        return 0
    own = [kind for kind in args.kinds if kind not in OVER_TRL]
    notes = [
        f"{args.shape} shape, random weights, bf16, LoRA r={args.rank} on all linear layers, "
        f"attention: sdpa; rows of {args.length} tokens, prompt and completion together; what is "
        "not said here: TRL's defaults",
        f"times: median, least and most of the steps after the first {args.skip} of {args.steps}; "
        "first_step_s compiles; peaks: of PyTorch's allocator, model and optimizer included, in "
        "the timed steps and in those before",
        "curve_difference: the largest distance to trl's curve at any step (where TRL has no "
        "trainer, to eager's), curve_to_fp32: to trl-fp32's, which has the same weights in float32",
        "trl's own losses are computed in chunks of tokens (its fused head); missed: rewrites that "
        "fxrl found no way for",
    ]
    if own:
        notes.append(
            f"{', '.join(own)}: all variants with AdamW at a constant learning rate of "
            f"{LEARNING_RATE:g}; kto and ppo compare with the model without its adapter, distill "
            "with another random one of its shape"
        )
    results = common.results(args, "TRL's trainers and fxrl's", COLUMNS, notes)
    results.extra |= {"curves": {}, "reports": {}}
    for kind in args.kinds:
        for variant in _variants(kind, args.variants):
            if variant.startswith("trl") and kind not in BY_TRL:
                results.add(kind=kind, variant=variant, error=_no_trainer(kind))
                continue
            found = measured(
                ["-m", "bench.trl_step", *words, "--worker", f"{kind}/{variant}"],
                environment=os.environ | _QUIET | _one_gpu(),
                limit_s=args.time_limit,
            )
            _add(results, kind, variant, found)
    results.finish()
    return int(results.failed("fxrl"))


def _variants(kind: str, given: Sequence[str]) -> list[str]:
    """Those that are measured: where TRL has no trainer, plain eager PyTorch takes its part."""
    if kind in BY_TRL or "eager" in given:
        return [*given]
    return ["eager", *given]


def _no_trainer(kind: str) -> str:
    return f"trl {common.versions().get('trl', '(not installed)')} has no trainer for {kind}"


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
        metric = "entropy" if kind == "grpo" else "loss"
        curve = curves[variant][metric]
        row |= {"curve": metric, "curve_first": curve[0], "curve_last": curve[-1]}
        peer = "trl" if kind in BY_TRL else "eager"
        for column, other in (("curve_difference", peer), ("curve_to_fp32", "trl-fp32")):
            if variant != other and other in curves:
                pairs = zip(curve, curves[other][metric], strict=True)
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
        kind: of ``KINDS``.
        variant: as in the module's text.

    Returns:
        Columns of its row, ``curves`` {metric: [steps]}, and fxrl's ``report``.
    """
    over_trl = kind in OVER_TRL or variant.startswith("trl")
    by = _by_trainer if over_trl else _by_fxrl_train
    clock = StepClock(args.device)
    with tempfile.TemporaryDirectory(prefix="fxrl-trl-step-") as folder:
        logged, report = by(args, kind, variant, folder, clock)
    timed, peaks = clock.seconds[args.skip :], clock.peaks
    names = [name for name in _LOGGED if name in logged[0]]
    found: dict[str, Any] = {
        "layers": args.layers or qwen.SHAPES[args.shape]["num_hidden_layers"],
        "tokens": round(logged[-1]["num_tokens"] / args.steps),
        "first_step_s": clock.seconds[0],
        "step_ms": statistics.median(timed) * 1e3,
        "step_ms_min": min(timed) * 1e3,
        "step_ms_max": max(timed) * 1e3,
        "peak_gib": common.gib(max(peaks[args.skip :])) if peaks else None,
        "first_peak_gib": common.gib(max(peaks[: args.skip])) if peaks else None,
        "curves": {name: [line[name] for line in logged] for name in names},
    }
    if report is not None:
        found |= {
            "missed": len(open_misses(report)),
            "report": [str(remark) for remark in report.remarks],
        }
    return found


class StepClock:
    """A callback of either trainer: the ``seconds`` of each step and, on a GPU, its ``peaks`` in
    bytes, the first of them since the process began."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.logs: list[dict[str, Any]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        common.synchronize(self.device)
        self.begun = time.perf_counter()

    def on_step_end(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        common.synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.begun)
        if logs is not None:  # fxrl's, whose phases have a peak each
            self.logs.append({**logs})
        if self.device == "cuda":
            peak = torch.cuda.max_memory_allocated()
            self.peaks.append(max(peak, (logs or {}).get("memory/peak_bytes", 0)))
            torch.cuda.reset_peak_memory_stats()


Ran = tuple[list[dict[str, Any]], fxrl.Report | None]
"""What each step logged, and what fxrl says of the train step if that is its own."""


def _by_trainer(
    args: argparse.Namespace, kind: str, variant: str, folder: str, clock: StepClock
) -> Ran:
    """Steps of TRL's trainer, or of the class over it."""
    from transformers import TrainerCallback

    trainer = make_trainer(args, kind, variant, folder)
    events = {name: getattr(clock, name) for name in ("on_step_begin", "on_step_end")}
    trainer.add_callback(type("Clock", (TrainerCallback,), events)())
    trainer.train()
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    return logged, trainer.train_step.report if variant.startswith("fxrl") else None


def make_trainer(args: argparse.Namespace, kind: str, variant: str, folder: str) -> Any:
    """A trainer over a new model, configured as one would for TRL."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig

    from fxrl.models.tiny import tiny_tokenizer

    name, _, memory = variant.partition(":")
    home: Any = trl
    cls = f"{BY_TRL[kind]}Trainer"
    given: dict[str, Any] = {}
    if name == "fxrl":
        from fxrl.integrations import trl as home

        cls = f"Fxrl{cls}"
        given["config"] = fxrl.Config(min_saved_bytes=0, gpu_memory=memory or None)
    if kind == "grpo":
        given |= {"reward_funcs": _reward, "rollout_func": _rollout(args.length)}
    trainer, texts, tokenizer = getattr(home, cls), _texts(args, kind), tiny_tokenizer()
    dtype = torch.float32 if name == "trl-fp32" else torch.bfloat16
    model = _model(args, kind).to(dtype)
    if kind == "distill":
        trainer = _without_generation(trainer, texts, tokenizer)
        given["teacher_model"] = _teacher(args).to(dtype)
    torch.manual_seed(0)  # LoRA's factors
    return trainer(
        model=model,
        args=getattr(trl, f"{BY_TRL[kind]}Config")(folder, **_options(args, kind, name)),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=args.rank,
            lora_alpha=args.rank,
            target_modules="all-linear",
            task_type="SEQ_CLS" if kind == "reward_model" else "CAUSAL_LM",
        ),
        **given,
    )


def _options(args: argparse.Namespace, kind: str, name: str) -> dict[str, Any]:
    """Keywords of TRL's configuration."""
    rows = args.tokens // args.length
    options: dict[str, Any] = {
        "per_device_train_batch_size": rows // _rows_each(kind),
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
    elif kind == "distill":
        options |= {"max_completion_length": args.length, "shuffle_dataset": False}
    else:
        options["max_length"] = args.length
    if kind not in OVER_TRL:
        learning = {"learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "seed": SEED}
        options |= learning | {k: v for k, v in LOSSES[kind].items() if k != "name"}
    if kind in ("kto", "reward_model"):
        options["train_sampling_strategy"] = "sequential"
    return options


def _without_generation(trainer: type, texts: Sequence[dict[str, Any]], tokenizer: Any) -> type:
    """``DistillationTrainer`` on given answers in place of what the student would draw."""
    told = [f"{row['completion']}{tokenizer.eos_token}" for row in texts]
    answers = dict(zip((row["prompt"] for row in texts), tokenizer(told)["input_ids"], strict=True))

    class Given(trainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: Any) -> list[list[int]]:
            return [answers[prompt] for prompt in tokenizer.batch_decode(prompt_ids)]

    return Given


def _by_fxrl_train(
    args: argparse.Namespace, kind: str, variant: str, folder: str, clock: StepClock
) -> Ran:
    """Steps of ``fxrl train``."""
    from fxrl.ir.remark import Remark
    from fxrl.models.tiny import tiny_tokenizer
    from fxrl.rl import Trainer

    name, _, memory = variant.partition(":")
    rows = args.tokens // args.length
    model = _model(args, kind)
    # It has a name, so that no file is made of it, for whoever loads the adapter.
    model.config._name_or_path = f"random-{args.shape}"
    tokenizer = tiny_tokenizer()
    model.config.pad_token_id = tokenizer.pad_token_id
    lora = {"r": args.rank, "alpha": args.rank}
    config: dict[str, Any] = {
        "run_dir": folder,
        "model": {"device": args.device, "gradient_checkpointing": True, "lora": lora},
        "data": {"chat": False, "shuffle": False},
        "loss": LOSSES[kind],
        "optim": {"lr": LEARNING_RATE, "weight_decay": 0.0, "fused": True},
        "fxrl": dataclasses.asdict(fxrl.Config(min_saved_bytes=0, gpu_memory=memory or None)),
        "optimize": name == "fxrl",
        "steps": args.steps,
        "seed": SEED,
        "prompts_per_step": rows // _rows_each(kind),
        "micro_batch_tokens": args.tokens,
        "save_every": 0,
        "log_to": [],
    }
    given: dict[str, Any] = {}
    if kind == "ppo":
        config["sampling"] = {"num_generations": 1, "max_tokens": args.length}
        given = {"rewards": _reward, "rollout_func": _rollout(args.length)}
    else:
        config["data"]["max_length"] = args.length
    if kind == "distill":
        config["teacher"] = {"id": _teacher(args)}
    Trainer(
        model,
        data=_texts(args, kind),
        config=config,
        callbacks=[clock],
        tokenizer=tokenizer,
        **given,
    ).train()
    notes = json.loads((Path(folder) / "run.json").read_text(encoding="utf-8"))
    remarks = tuple(Remark(**remark) for remark in notes.get("report", ()))
    return clock.logs, fxrl.Report(remarks) if name == "fxrl" else None


# -- the model


def _model(args: argparse.Namespace, kind: str, seed: int = 0) -> Any:
    return qwen.make_model(
        args.shape,
        args.device,
        layers=args.layers,
        rank=0,
        checkpointing=False,
        seed=seed,
        scalar_head=kind == "reward_model",
    )


def _teacher(args: argparse.Namespace) -> Any:
    """Another model of the same shape."""
    return _model(args, "distill", seed=1).requires_grad_(False).eval()


# -- texts: a letter is a token


def _letters(draw: random.Random, count: int, often: str = "etaoin") -> str:
    weights = [8 if letter in often else 1 for letter in string.ascii_lowercase]
    return "".join(draw.choices(string.ascii_lowercase, weights, k=count))


def _rows_each(kind: str) -> int:
    """Sequences of a row of the data."""
    return 2 if kind in ("dpo", "reward_model") else 1


def _texts(args: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
    """Rows of ``args.length`` tokens for all steps, the last of which is the end's that a trainer
    adds."""
    draw = random.Random(0)
    length = args.length
    room = length - 1 - len(PROMPT.format(0))
    rows: list[dict[str, Any]] = []
    for number in range(args.tokens // length * args.steps):
        row: dict[str, Any] = {"prompt": PROMPT.format(number)}
        if kind == "sft":
            row = {"text": _letters(draw, length - 1)}
        elif kind in ("dpo", "reward_model"):
            row["chosen"] = _letters(draw, room)
            row["rejected"] = _letters(draw, room, "zqxjkv")
        elif kind == "kto":
            row["label"] = number % 2 == 0
            row["completion"] = _letters(draw, room, "etaoin" if row["label"] else "zqxjkv")
        elif kind == "distill":
            row["completion"] = _letters(draw, room)
        rows.append(row)
    return rows


def _rollout(length: int) -> Any:
    """A ``rollout_func``: the same completions for the same prompt, whatever the policy. Nothing
    reads their log-probs."""

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        tokenizer = trainer.processing_class
        asked = [tokenizer(prompt)["input_ids"] for prompt in prompts]
        drawn = [
            _letters(random.Random(f"{prompt}{number}"), length - len(ids))
            for number, (prompt, ids) in enumerate(zip(prompts, asked, strict=True))
        ]
        completions = tokenizer(drawn)["input_ids"]
        logprobs = [[0.0] * len(ids) for ids in completions]
        return {"prompt_ids": asked, "completion_ids": completions, "logprobs": logprobs}

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
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"--kinds has {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    names = {variant.partition(":")[0] for variant in args.variants}
    if unknown := names - {"trl", "trl-liger", "trl-fp32", "fxrl", "eager"}:
        parser.error(f"--variants has {', '.join(sorted(unknown))}; see --help")
    if "eager" in names and (over := set(args.kinds) & set(OVER_TRL)):
        parser.error(f"--variants has eager, which {', '.join(sorted(over))} have not; see --help")
    if args.tokens % (2 * args.length):
        parser.error(f"--tokens {args.tokens} is no even number of rows of --length {args.length}")
    if args.skip >= args.steps:
        parser.error(f"--skip {args.skip} leaves none of --steps {args.steps}")
    return args


if __name__ == "__main__":
    sys.exit(main())
