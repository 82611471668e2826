"""The JSON schema and examples/config.md: complete, true of the examples, and what they show."""

import copy
import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest

from fxrl.cli import main
from fxrl.models.tiny import tiny_tokenizer
from fxrl.rl.config.load import config_of
from fxrl.rl.config.schema import json_schema
from fxrl.rl.data.questions import PromptBuilder, read_source

EXAMPLES = Path(__file__).parents[3] / "examples"
TEXT = (EXAMPLES / "config.md").read_text()
SCHEMA = json_schema()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


def is_valid(table):
    return jsonschema.Draft202012Validator(SCHEMA).is_valid(table)


def test_the_command_prints_it(capsys):
    assert main(["train", "--schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(printed)
    assert printed == json.loads(json.dumps(SCHEMA))


def test_every_key_has_a_description():
    for table in (SCHEMA, *SCHEMA["$defs"].values()):
        assert table["description"]
        for name, one in table["properties"].items():
            assert one["description"].endswith("."), name


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.toml")), ids=lambda file: file.name)
def test_the_examples_are_valid(file):
    assert is_valid(tomllib.loads(file.read_text()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("steps",), 0),
        (("steps",), "ten"),
        (("stepz",), 10),
        (("loss", "normalize"), "words"),
        (("sampling", "temperature"), 0),
        (("model", "lora", "r"), 1.5),
        (("reward", "functions"), "exact"),
        (("optim", "weight_decay"), None),  # null is valid, as what torch.optim takes is not known
    ],
)
def test_wrong_values_are_not(path, value):
    table = tomllib.loads((EXAMPLES / "tiny.toml").read_text())
    changed = copy.deepcopy(table)
    *outer, last = path
    inner = changed
    for part in outer:
        inner = inner[part]
    inner[last] = value
    assert is_valid(table)
    assert is_valid(changed) is (last == "weight_decay")


def test_the_rows_and_tables_of_the_reference_are_read(tmp_path, monkeypatch):
    """Each JSON line with the TOML that goes with it becomes a prompt."""
    monkeypatch.chdir(tmp_path)
    text, chat, columns = blocks("json")
    named, inline, *_ = (tomllib.loads(block) for block in blocks("toml"))
    cases = [({"path": "a.jsonl"}, text), ({"path": "a.jsonl"}, chat), (named["data"], columns)]
    for data, line in [*cases, (inline["data"], "")]:
        Path(data.get("path", "unused")).write_text(line)
        rest = {"model": {"id": "tiny:qwen3"}, "reward": {"functions": ["exact"]}}
        config = config_of({"data": data, **rest}, "config.md", "runs/a").data
        source = read_source(config)
        [row] = source.rows
        prompt = PromptBuilder(config, source.prompt, [], tiny_tokenizer(512)).prompt(row)
        assert prompt[-1]["role"] == "user"
        assert "{" not in prompt[-1]["content"]
        assert config.answer in row


def test_the_reward_of_the_reference_trains(config_file):
    function, play = blocks("python")
    Path("mine.py").write_text(f"{function}\n\n{play}")
    options = ["reward.functions=['mine:close_to']", "reward.params={}", "steps=1", "run_dir=a"]
    options += ["rollout.rollout_func=mine:play"]
    assert main(["train", str(config_file), *options]) == 0
    [line] = Path("a/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["rewards/close_to/mean"] < 0


def test_the_tools_of_the_reference_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("calculator.py").write_text("def add(a: int, b: int) -> int: ...")
    Path("game.py").write_text("class Game: ...")
    table, played = (tomllib.loads(block) for block in blocks("toml")[2:])
    rest = {"model": {"id": "tiny:qwen3"}}
    asked = {"data": {"rows": [{"prompt": "?"}]}}
    assert config_of(table | rest | asked, "config.md", "runs/a").rollout.timeout_s == 30
    assert config_of(played | rest, "config.md", "runs/a").data.verifiers["agent"]
