"""Runs with environments: resumed exactly, and nothing lost by one that fails."""

import json

import pytest

from fxrl.rl.train import main

WORLD = """
import pathlib

class World:
    def reset(self, prompt, **columns):
        if pathlib.Path("broken").exists():
            raise OSError("no sandbox")
        self.prompt = prompt
        return f" in world {len(prompt)}"

    def look(self, far: int = 1) -> str:
        '''Looks around.

        Args:
            far: how far.
        '''
        return "nothing"

    async def get_reward(self):
        return len(self.prompt) / 100
"""
ENVIRONMENT = ["rollout.environment_factory=world.py:World", "sampling.num_generations=3"]


@pytest.fixture
def run(config_file, tmp_path, capsys):
    (tmp_path / "world.py").write_text(WORLD)

    def run(name, *overrides, **options):
        options = {"json": True} | options
        code = main(str(config_file), [*ENVIRONMENT, f"run_dir={name}", *overrides], **options)
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return code, events, tmp_path / name

    return run


def lines(folder, name="metrics.jsonl"):
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [
        {k: v for k, v in one.items() if "time" not in k and "per_second" not in k} for one in found
    ]


def test_a_resumed_run_draws_the_same(run):
    code, _, whole = run("whole", "steps=3")
    assert code == 0
    first = lines(whole)[0]
    assert first["rewards/World/mean"] == pytest.approx(0.1)  # "count to 1" has 10 characters
    assert first["tools/call_frequency"] == 0.0
    assert lines(whole, "completions.jsonl")[0]["question"].endswith(" in world 10")
    checkpoint = str(whole / "checkpoints" / "step-00000002")
    code, _, rest = run("rest", "steps=3", resume=checkpoint)
    assert code == 0
    assert lines(rest) == lines(whole)[2:]
    assert lines(rest, "completions.jsonl") == lines(whole, "completions.jsonl")[4:]


def test_an_environment_that_cannot_begin_loses_nothing(run, tmp_path):
    run("whole", "steps=3")
    assert run("other", "steps=2")[0] == 0
    (tmp_path / "broken").touch()
    code, events, folder = run("other", "steps=3", resume="")
    assert code == 1
    [text] = [event["text"] for event in events if event["event"] == "error"]
    for part in ("World.reset raised OSError('no sandbox') at world.py:7", "'count to", "--resume"):
        assert part in text
    (tmp_path / "broken").unlink()
    assert run("other", "steps=3", resume="")[0] == 0
    assert lines(folder) == lines(tmp_path / "whole")


WRONG = {
    "rollout.tools=['add']": "rollout.tools: 'add' is no module:function",
    "rollout.tools=['world.py:ad']": "has no function 'ad'",
    "rollout.tools=['world.py:World']": "cannot be told to the model",
    "rollout.rollout_func=world.py:World": "leave it or tools and environments out",
    "rollout.environment_factory=world.py:pathlib.Path": "PosixPath has no method reset",
    "rollout.environment_factory={a='world.py:World'}": "its column 'environment' is None",
    "data.chat=false": "set data.chat=true",
    "rollout.timeout_s=0": "rollout.timeout_s=0.0 must be above 0",
    "max_tool_calling_iterations=3": "'rollout.max_tool_calling_iterations'",
    "data.max_prompt_tokens=10": "the prompt has",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_is_wrong_is_said_before_the_model_is_loaded(run, override):
    code, events, _ = run("wrong", override)
    assert code == 2
    assert WRONG[override] in events[-1]["text"]
