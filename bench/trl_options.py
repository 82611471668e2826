"""TRL's options away from their defaults, each through TRL's trainer and fxrl's: the same run?

    python -m bench.trl_options --out FILE [--trainers SFT,DPO] [--only loss_type]

Two steps of SGD on a tiny random Qwen3, in float32, an adapter unless the case says otherwise. All
that is logged and all weights are compared, times excepted. ``examples/trl.md`` says of every
option what becomes of it; these are the ones that change what is computed, or how often.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fxrl
from bench.lib import common
from fxrl.errors import ConfigError
from fxrl.models import load_model

COLUMNS = ("trainer", "runs", "equal", "refused", "not_in_trl", "differ")
TRAINERS = ("GRPO", "RLOO", "SFT", "DPO", "KTO")
EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1}
TWICE = {"num_iterations": 2, "steps_per_generation": 2}
WHOLE = {"lora": False}
NOTE = (
    "of two steps, all that is logged and all weights; refused: by fxrl, with the reason that "
    "examples/trl.md gives; not in TRL: its own trainer refuses it too"
)
Options = dict[str, Any]


def each(**values: list[Any]) -> list[Options]:
    """One case for each value of each option."""
    return [{name: value} for name, given in values.items() for value in given]


COMMON = [EVERY_STEP, WHOLE, {"gradient_accumulation_steps": 2}, {"pad_to_multiple_of": 8}]
FURTHER = COMMON + each(
    max_grad_norm=[0.0, 0.1],
    neftune_noise_alpha=[5.0],
    optim=["adafactor"],
    use_cache=[True],
    torch_empty_cache_steps=[1],
    auto_find_batch_size=[True],
    gradient_checkpointing=[True],
    average_tokens_across_devices=[False],
    debug=["underflow_overflow"],
    use_liger_kernel=[True],
    torch_compile=[True],
)
FURTHER += [EVERY_STEP | {"bf16_full_eval": True}]
REFERENCE = [WHOLE | {"sync_ref_model": True, "ref_model_sync_steps": 1}, {"disable_dropout": True}]
ONLINE = REFERENCE + each(
    beta=[0.0],
    temperature=[0.7],
    top_k=[5],
    top_p=[0.7],
    min_p=[0.1],
    repetition_penalty=[1.2],
    generation_kwargs=[{"typical_p": 0.9}],
    cache_implementation=["static"],
    mask_truncated_completions=[True],
    reward_weights=[[2.0]],
    shuffle_dataset=[False],
    steps_per_generation=[2],
    num_iterations=[2],
)
GIVEN = REFERENCE + each(
    beta=[0.3], max_length=[8], precompute_ref_log_probs=[True], activation_offloading=[True]
)
CASES: dict[str, list[Options]] = {
    "GRPO": FURTHER
    + ONLINE
    + each(
        loss_type=["grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"],
        importance_sampling_level=["sequence"],
        multi_objective_aggregation=["normalize_then_sum"],
        scale_rewards=["batch", "none"],
        top_entropy_quantile=[0.5],
        use_transformers_continuous_batching=[True],
        cast_lm_head_to_fp32=[True],
        entropy_coef=[0.01],
    )
    + [
        TWICE | {"delta": 1.5},
        TWICE | {"epsilon": 0.1, "epsilon_high": 0.3},
        TWICE | {"off_policy_mask_threshold": 0.01},
        TWICE | {"use_bias_correction_kl": False},
        {"use_adaptive_entropy": True, "entropy_coef": 0.01},
    ],
    "RLOO": COMMON
    + ONLINE
    + each(normalize_advantages=[True], reward_clip_range=[(-1.0, 1.0)])
    + [TWICE | {"epsilon_high": 0.3}],
    "SFT": FURTHER
    + each(
        loss_type=["dft"],
        completion_only_loss=[False],
        max_length=[8],
        label_smoothing_factor=[0.1],
        activation_offloading=[True],
        train_sampling_strategy=["group_by_length"],
    )
    + [
        {"padding_free": True, "max_length": None},
        {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
        EVERY_STEP | {"packing": True, "eval_packing": False, "max_length": 16},
        {"max_length": 8, "truncation_mode": "keep_end"},
    ],
    "DPO": COMMON
    + GIVEN
    + [{"loss_type": [name]} for name in (
        "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero",
        "apo_down", "discopop", "sft", "sigmoid_norm",
    )]
    + [{"loss_type": [name], "label_smoothing": 0.1} for name in ("sigmoid", "robust", "exo_pair")]
    + each(
        f_divergence_type=["forward_kl", "js_divergence"],
        ld_alpha=[0.5],
        use_weighting=[True],
        padding_free=[True],
    )
    + [
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
        {"loss_type": ["discopop"], "discopop_tau": 0.1},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.5},
        {"truncation_mode": "keep_end", "max_length": 8},
        {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 2},
    ],
    "KTO": COMMON
    + GIVEN
    + each(loss_type=["apo_zero_unpaired"])
    + [{"desirable_weight": 2.0, "undesirable_weight": 0.5}],
}  # fmt: skip

ARGS: Options = {
    "report_to": [],
    "max_steps": 2,
    "logging_steps": 1,
    "per_device_train_batch_size": 4,
    "use_cpu": True,
    "bf16": False,
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}
DRAWN = {"num_generations": 2, "max_completion_length": 5, "temperature": 0.9, "beta": 0.1}
_PROMPTS = ["a b", "hello there", "1 + 1 =", "x"] * 2
_GOOD, _BAD = [" c d e", " you", " 2", " y z"] * 2, [" c", " me", " 11", " z"] * 2
ROWS = {
    "GRPO": {"prompt": _PROMPTS},
    "RLOO": {"prompt": _PROMPTS},
    "SFT": {"prompt": _PROMPTS, "completion": _GOOD},
    "DPO": {"prompt": _PROMPTS, "chosen": _GOOD, "rejected": _BAD},
    "KTO": {"prompt": _PROMPTS, "completion": _GOOD, "label": [True, False] * 4},
}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def trained(name: str, own: bool, model: Path, folder: Path, options: Options) -> Any:
    """A trainer of TRL's own or of fxrl's, after its steps."""
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from fxrl.integrations import trl as ours

    options = ARGS | (DRAWN if name in ("GRPO", "RLOO") else {}) | options
    lora = (
        LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if options.pop("lora", True) else None
    )
    given: Options = (
        {} if own else {"config": fxrl.Config(min_saved_bytes=0, compile_regions=False)}
    )
    if name in ("GRPO", "RLOO"):
        given["reward_funcs"] = reward
    trainer = getattr(trl, f"{name}Trainer") if own else getattr(ours, f"Fxrl{name}Trainer")
    torch._dynamo.reset()
    torch.manual_seed(0)
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(model),
        args=getattr(trl, f"{name}Config")(str(folder), **options),
        train_dataset=Dataset.from_dict(ROWS[name]),
        eval_dataset=Dataset.from_dict({key: rows[:4] for key, rows in ROWS[name].items()}),
        processing_class=AutoTokenizer.from_pretrained(model),
        peft_config=lora,
        **given,
    )
    made.train()
    return made


def compared(name: str, model: Path, options: Options) -> str:
    """``equal``, ``refused: why``, ``not in TRL: why its own fails``, or what differs."""
    with tempfile.TemporaryDirectory() as folder:
        failed: Exception | None = None
        try:
            mine = trained(name, False, model, Path(folder, "fxrl"), options)
        except ConfigError as error:
            return f"refused: {error}"
        except Exception as error:
            failed = error
        try:
            theirs = trained(name, True, model, Path(folder, "trl"), options)
        except Exception as error:
            return f"not in TRL: {common.error_text(error)}"
    return common.error_text(failed) if failed else next(_differences(theirs, mine), "equal")


def _differences(theirs: Any, mine: Any) -> Iterator[str]:
    logs, timed = (theirs.state.log_history, mine.state.log_history), ("time", "_per_second")
    if len(logs[0]) != len(logs[1]):
        yield f"{len(logs[0])} and {len(logs[1])} lines are logged"
    for wanted, got in zip(*logs, strict=False):
        for key in wanted.keys() | got.keys():
            pair = wanted.get(key, "not logged"), got.get(key, "not logged")
            if not any(word in key for word in timed) and not _close(*pair):
                yield f"{key} {pair[1]}, TRL {pair[0]}"
    weights = dict(theirs.model.named_parameters())
    for key, weight in mine.model.named_parameters():
        if not _close(weights[key], weight):
            yield f"{key} is up to {(weights[key] - weight).abs().max():.2g} off"


def _close(wanted: Any, got: Any) -> bool:
    """To some units in the last place of a sequence's log-probability, which is about -30."""
    try:
        torch.testing.assert_close(got, wanted, rtol=2e-4, atol=1e-5)
    except AssertionError:
        return False
    return True


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--trainers", type=common.words, default=list(TRAINERS))
    parser.add_argument("--only", default="", help="cases with an option whose name has this in it")
    args = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}  # CI: no telemetry
    warnings.simplefilter("ignore")
    title = "TRL's options, through TRL's trainers and fxrl's"
    results = common.results(args, title, COLUMNS, [NOTE])
    runs = results.extra["runs"] = {}
    with tempfile.TemporaryDirectory() as home:
        torch.manual_seed(0)
        for part in load_model("tiny:qwen3:layers=1,hidden=32"):
            part.save_pretrained(home)
        for name in args.trainers:
            cases = [case for case in CASES[name] if any(args.only in option for option in case)]
            runs[name] = found = {}
            for case in cases:
                key = ", ".join(f"{option}={value!r}" for option, value in case.items())
                found[key] = compared(name, Path(home), case)
                results.say(f"{name} {key}: {found[key]}")
            results.add(trainer=name, **_counts(found))
    results.finish()
    return int(any(row[-1] != "none" for row in results.rows))


def _counts(found: dict[str, str]) -> dict[str, Any]:
    kinds = [outcome.partition(":")[0] for outcome in found.values()]
    known = ("equal", "refused", "not in TRL")
    counts = {kind.lower().replace(" ", "_"): kinds.count(kind) for kind in known}
    differ = [key for key, kind in zip(found, kinds, strict=True) if kind not in known]
    return {"runs": len(kinds), **counts, "differ": "; ".join(differ) or "none"}


if __name__ == "__main__":
    sys.exit(main())
