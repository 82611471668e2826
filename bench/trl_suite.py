"""TRL's own tests, with its trainers and with fxrl's in their place; and the two runs compared.

    python -m bench.trl_suite CHECKOUT --runs FOLDER [--own] [--trainers SFT] [pytest options]
    python -m bench.trl_suite CHECKOUT --runs FOLDER --compare --out FILE

``CHECKOUT`` is a clone of TRL's repository: its sdist has no tests. With ``--own`` TRL's trainers
are tested, for the comparison; otherwise ``GRPOTrainer`` (RLOO, SFT, DPO, KTO) of each test module
is fxrl's, from which classes in the tests derive too. Each run leaves ``FOLDER/NAME-trl.xml`` or
``NAME-fxrl.xml``. Models and data sets that the tests take from the hub are made in the checkout
under their names: random weights, a byte tokenizer, the texts of TRL's own scripts. Tests that need
another one, and tests of what the installed TRL does not have, fail in both runs alike.
"""

from __future__ import annotations

import ast
import functools
import importlib
import os
import runpy
import sys
import xml.etree.ElementTree as ElementTree
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from bench.lib import common

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
COLUMNS = ("trainer", "tests", "trl_passed", "fxrl_passed", "skipped", "only_trl", "only_fxrl")


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


def fill_in(tests: Path) -> None:
    """Gives TRL's modules the names that a test file of another version imports from them.

    Without one of them no test of the file would run; what uses it fails, and says why.
    """
    imports = (n for n in ast.walk(ast.parse(tests.read_text())) if isinstance(n, ast.ImportFrom))
    for node in imports:
        if node.level or not (node.module or "").startswith("trl."):
            continue
        module = importlib.import_module(node.module)
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                setattr(module, name, functools.partial(_gone, f"{node.module}.{name}"))


def _gone(name: str, *_: Any, **__: Any) -> None:
    raise NotImplementedError(f"the installed TRL has no {name}")


def run(given: Namespace, options: list[str]) -> int:
    """The tests of each trainer; the worst of pytest's exit codes."""
    import pytest

    root, folder = given.checkout.resolve(), given.runs.resolve()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CI": "1"}
    if not (root / "trl-internal-testing" / "zen").exists():
        make_hub(root, root)
    os.chdir(root)
    worst = 0
    for name in given.trainers:
        tests = f"tests/test_{name.lower()}_trainer.py"
        fill_in(Path(tests))
        file = folder / f"{name}-{'trl' if given.own else 'fxrl'}.xml"
        fixed = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--junitxml={file}"]
        plugins = [] if given.own else [Substitution()]
        worst = max(worst, int(pytest.main([*fixed, tests, *options], plugins=plugins)))
    return worst


def outcomes(file: Path) -> Iterator[tuple[str, str]]:
    """(test, "passed", "failed" or "skipped") of a run."""
    for case in ElementTree.parse(file).iter("testcase"):
        kinds = {part.tag for part in case}
        bad, skipped = kinds & {"failure", "error"}, "skipped" in kinds
        name = f"{case.get('classname')}::{case.get('name')}"
        yield name, "failed" if bad else "skipped" if skipped else "passed"


def compare(given: Namespace) -> None:
    """One row for each trainer that both runs are there of."""
    results = common.results(given, "TRL's own tests, with its trainers and with fxrl's", COLUMNS)
    for name in TRAINERS:
        files = [given.runs / f"{name}-{who}.xml" for who in ("trl", "fxrl")]
        if not all(file.exists() for file in files):
            continue
        theirs, mine = (dict(outcomes(file)) for file in files)
        assert theirs.keys() == mine.keys(), f"{name}: the runs are of different tests"
        won = [{n for n, o in found.items() if o == "passed"} for found in (theirs, mine)]
        only = [", ".join(sorted(n.split("::")[1] for n in a - b)) for a, b in (won, won[::-1])]
        results.add(
            trainer=name,
            tests=len(mine),
            trl_passed=len(won[0]),
            fxrl_passed=len(won[1]),
            skipped=sum(outcome == "skipped" for outcome in mine.values()),
            only_trl=only[0] or "none",
            only_fxrl=only[1] or "none",
        )
    results.finish()


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of TRL's repository")
    parser.add_argument("--runs", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--trainers", nargs="+", default=TRAINERS, choices=TRAINERS)
    parser.add_argument("--own", action="store_true", help="TRL's own trainers, to compare with")
    parser.add_argument("--compare", action="store_true", help="the runs, side by side")
    given, options = parser.parse_known_args()
    if not given.compare:
        return run(given, options)
    compare(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
