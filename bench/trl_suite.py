"""TRL's own tests, with its trainers and with fxrl's in their place.

    python -m bench.trl_suite CHECKOUT [--own] [what pytest takes, such as tests/test_x.py -k y]

``CHECKOUT`` is a clone of TRL's repository at the tag of the installed version: its sdist has no
tests. With ``--own`` TRL's trainers are tested, for the comparison; otherwise ``GRPOTrainer``
(RLOO, SFT, DPO, KTO) of each test module is fxrl's, from which classes in the tests derive too.
Models and data sets that the tests take from the hub are made in the checkout under their names:
random weights, a byte tokenizer, the texts of TRL's own scripts. Tests that need another one fail
in both runs alike.
"""

from __future__ import annotations

import argparse
import functools
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

KINDS = {
    "tiny-Qwen2ForCausalLM-2.5": "tiny:qwen2",
    "tiny-Qwen3ForCausalLM": "tiny:qwen3",
    "tiny-LlamaForCausalLM-3.2": "tiny:llama",
    "tiny-MistralForCausalLM-0.2": "tiny:mistral",
    "tiny-Gemma2ForCausalLM": "tiny:gemma2",
    "tiny-GptOssForCausalLM": "tiny:gpt-oss",
    "tiny-GPT2LMHeadModel": "tiny:gpt2",
}
OTHERS = {
    "tiny-Cohere2ForCausalLM": ("cohere2", {"sliding_window": 32}),
    "tiny-Olmo3ForCausalLM": ("olmo3", {"sliding_window": 32}),
    "tiny-Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}
JUDGES = {"tiny-Qwen2ForSequenceClassification-2.5": "qwen2"}
JUDGES |= {"tiny-Qwen3ForSequenceClassification": "qwen3"}
TRAINERS = ("GRPO", "RLOO", "SFT", "DPO", "KTO")


def make_hub(folder: Path, checkout: Path) -> None:
    """``folder/trl-internal-testing/NAME``: found as a local path before the hub is asked."""
    from datasets import DatasetDict
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from fxrl.models import load_model
    from fxrl.models.tiny import tiny_config, tiny_tokenizer

    home = folder / "trl-internal-testing"
    for name, kind in KINDS.items():
        model, tokenizer = load_model(f"{kind}:hidden=16,head_dim=4,intermediate=32")
        for part in (model, tokenizer):
            part.save_pretrained(home / name)
        for judge, its in JUDGES.items():
            if kind == f"tiny:{its}":
                config = tiny_config(its, hidden=16, head_dim=4, intermediate=32)
                config.num_labels = 1
                AutoModelForSequenceClassification.from_config(config).save_pretrained(home / judge)
                tokenizer.save_pretrained(home / judge)

    sizes = tiny_config("qwen3", hidden=16, head_dim=4, intermediate=32).to_diff_dict()
    del sizes["model_type"]
    for name, (kind, extra) in OTHERS.items():
        config = AutoConfig.for_model(kind, **(sizes | extra))
        AutoModelForCausalLM.from_config(config).save_pretrained(home / name)
        tiny_tokenizer().save_pretrained(home / name)

    def keep(data: DatasetDict, repository: str, config_name: str, **_: object) -> None:
        place = folder / repository
        for split, rows in data.items():
            rows.to_parquet(place / config_name / f"{split}-0.parquet")
        named = sorted(part.name for part in place.iterdir() if part.is_dir())
        lines = [f"- config_name: {name}\n  data_dir: {name}" for name in named]
        (place / "README.md").write_text("\n".join(("---", "configs:", *lines, "---", "")))

    sent, DatasetDict.push_to_hub = DatasetDict.push_to_hub, keep
    try:
        for script in ("zen", "toolcall"):
            main = runpy.run_path(str(checkout / f"scripts/generate_{script}_dataset.py"))["main"]
            repository = f"trl-internal-testing/{script}"
            main(test_size=0.1, push_to_hub=True, repo_id=repository)
    finally:
        DatasetDict.push_to_hub = sent


class Substitution:
    """A plugin of pytest: fxrl's trainers under TRL's names, in the modules of the tests alone."""

    def pytest_collection_modifyitems(self, items: list) -> None:
        import fxrl
        from fxrl.integrations import trl as ours

        config = fxrl.Config(min_saved_bytes=0, compile_regions=False)
        modules: set[ModuleType] = {item.module for item in items}
        for module in modules:
            for name in TRAINERS:
                theirs = f"{name}Trainer"
                if hasattr(module, theirs):
                    mine = getattr(ours, f"Fxrl{theirs}")
                    setattr(module, theirs, with_config(mine, config))


def with_config(trainer: type, config: object) -> type:
    """A subclass whose ``config`` is given."""
    init = functools.partialmethod(trainer.__init__, config=config)
    return type(trainer.__name__, (trainer,), {"__init__": init})


def main(argv: list[str] | None = None) -> int:
    import pytest

    parser = argparse.ArgumentParser(prog="bench.trl_suite", description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clone of TRL's repository, at a tag")
    parser.add_argument("--own", action="store_true", help="TRL's own trainers, to compare with")
    given, rest = parser.parse_known_args(argv)
    root = given.checkout.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}
    if not (root / "trl-internal-testing" / "zen").exists():
        make_hub(root, root)
    os.chdir(root)
    if not any(part.startswith("tests/") for part in rest):
        rest += [f"tests/test_{name.lower()}_trainer.py" for name in TRAINERS]
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *rest]
    return int(pytest.main(options, plugins=[] if given.own else [Substitution()]))


if __name__ == "__main__":
    sys.exit(main())
