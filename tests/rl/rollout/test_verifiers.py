"""Environments of verifiers: its own runner and scoring, around a policy that follows a script."""

import asyncio
import gc
import importlib.util
import json
import os
import socket
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from fxrl.distributed import Ranks
from fxrl.engines import Completion
from fxrl.errors import ConfigError, MissingPackageError
from fxrl.models import load_model, tiny_tokenizer
from fxrl.rl.config.load import config_of
from fxrl.rl.errors import DataError, ToolError
from fxrl.rl.loop.data import read_questions
from fxrl.rl.report.progress import Reporter
from fxrl.rl.report.timing import Clock
from fxrl.rl.train import main
from fxrl.rl.types import TrainerState
from tests.forked import in_processes
from tests.rl.metrics import numbers

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id
TOLD = "<|im_start|>tool\n"
INSTALLED = importlib.util.find_spec("verifiers") is not None
needs_verifiers = pytest.mark.skipif(not INSTALLED, reason="verifiers (extra) is not installed")
pytestmark = pytest.mark.verifiers

ENVIRONMENT = '''
"""Sums of two numbers, whose harness adds where the policy calls its tool, in this process."""

import json

import httpx
import verifiers.v1 as vf

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {name: {"type": "integer", "description": "one"} for name in "ab"},
            "required": ["a", "b"],
        },
    },
}


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        said = trace.last_reply or ""
        return float(said == self.data.answer) if self.data.answer else len(said) % 7 / 7


class SumsConfig(vf.TasksetConfig):
    by_length: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for a, b in [(1, 2), (3, 4)]:
            answer = "" if self.config.by_length else str(a + b)
            yield SumTask(SumData(prompt=f"{a}+{b}?", answer=answer), self.config.task)


class AddingConfig(vf.HarnessConfig):
    again: bool = False
    edits: bool = False
    extra: dict = {}
    stream: bool = False


class Adding(vf.Harness[AddingConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, *_, **__):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None) as client:
            while True:
                body = {"model": ctx.model, "messages": messages, "tools": [TOOL]}
                found = await client.post(
                    f"{endpoint}/chat/completions",
                    json={**body, **self.config.extra, "stream": self.config.stream},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                found.raise_for_status()
                said = self.read(found.text)
                messages.append(said)
                if not said.get("tool_calls"):
                    if not self.config.again or len(messages) > 2:
                        return vf.ProgramResult(0, "", "")
                    messages.append({"role": "user", "content": "And again?"})
                    continue
                for call in said["tool_calls"]:
                    numbers = json.loads(call["function"]["arguments"])
                    answer = {"role": "tool", "tool_call_id": call["id"]}
                    messages.append({**answer, "content": str(sum(numbers.values()))})
                if self.config.edits:
                    messages[0] = {"role": "user", "content": "something else"}

    def read(self, text):
        if not self.config.stream:
            return json.loads(text)["choices"][0]["message"]
        said = {}
        for line in text.splitlines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    said |= choice["delta"]
        for call in said.get("tool_calls", ()):
            call.pop("index")
        return said


__all__ = ["Adding", "Sums"]
'''


@pytest.fixture
def sums(tmp_path, monkeypatch):
    """The name of an installed environment."""
    (tmp_path / "sums_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    yield "sums_env"
    sys.modules.pop("sums_env", None)


class Policy:
    """Says what ``script`` makes of the conversation, and stops; a log-prob is its place."""

    policy_version = 3
    eos_token_ids = frozenset({EOS})

    def __init__(self, script):
        self.script, self.timings, self.calls = script, {}, []

    def generate(self, prompts, params, *, only=None, on_finished=None, max_tokens=None):
        self.calls.append(sorted(only))
        drawn = [[] for _ in prompts]
        for place in only:
            said = self.script(TOKENIZER.decode(prompts[place]), place)
            ids = TOKENIZER(said, add_special_tokens=False)["input_ids"]
            tokens = (*ids, EOS)[: max_tokens[place]]
            reason = "stop" if tokens[-1] == EOS else "length"
            logprobs = tuple(-(1 + i) / 64 for i in range(len(tokens)))
            drawn[place] = [Completion(tuple(prompts[place]), tokens, logprobs, reason, 3)]
        return drawn

    def state_dict(self):
        return {}


def rolled(environment, script, **tables):
    """A step over both tasks, two rollouts each, and the policy."""
    table = {
        "model": {"id": "tiny:qwen3"},
        "data": {"verifiers": environment},
        "reward": {"functions": []},
        "sampling": {"num_generations": 2, "max_tokens": 300} | tables.pop("sampling", {}),
        "prompts_per_step": 2,
        "eval": {"size": 0},
        "run_dir": "unused",
    }
    config = config_of(table | tables, "test", "unused").settled()
    questions = read_questions(config, TOKENIZER, print)
    policy, stage = Policy(script), Reporter(Console(quiet=True)).stage
    rollouter = questions.source(policy, config, TOKENIZER, stage, Ranks())
    rows, state = questions.split.train, TrainerState(1, 2, 0.5)
    clock = Clock(torch.device("cpu"))
    return rollouter.experience(lambda count: rows, lambda: state, clock), policy


def adds_then_answers(conversation, place):
    """Calls the tool, and says its answer; the last rollout answers at once, and wrongly."""
    if place == 3:
        return "5"
    if TOLD in conversation:
        return conversation.rpartition(TOLD)[2].partition("<|im_end|>")[0]
    a, b = conversation.partition("?")[0][-3:].split("+")
    numbers = {"a": int(a), "b": int(b)}
    return f"<tool_call>{json.dumps({'name': 'add', 'arguments': numbers})}</tool_call>"


@needs_verifiers
@pytest.mark.parametrize("stream", [False, True])
def test_an_environment_is_played_and_judges(sums, stream):
    harness = {"id": sums, "stream": stream}
    agent = {"harness": harness, "runtime": {"type": "subprocess"}}
    table = {"taskset": {"id": sums}, "agent": agent}
    rollout, policy = rolled(table, adds_then_answers)
    assert policy.calls == [[0, 1, 2, 3], [0, 1, 2]]
    assert [drawn.total for drawn in rollout.drawn] == [2.0, 2.0, 2.0, 0.0]
    assert rollout.metrics["tools/call_frequency"] == 0.75
    for drawn in rollout.drawn[:3]:
        one = drawn.completion
        pairs = [*zip(one.token_ids, one.sampled, strict=True)]
        said, told = (
            TOKENIZER.decode([t for t, s in pairs if s is kind]) for kind in (True, False)
        )
        assert "<tool_call>" in said
        assert TOLD not in said
        assert TOLD in told
        assert one.finish_reason == "stop"
        assert TOKENIZER.decode(one.prompt_token_ids).startswith("tool add a b\n")
    assert [d.completion.sampled for d in rollout.drawn[3:]] == [None]


@needs_verifiers
def test_a_name_alone_is_played_here(sums):
    rollout, _ = rolled(sums, adds_then_answers)
    assert [drawn.total for drawn in rollout.drawn] == [2.0, 2.0, 2.0, 0.0]


@needs_verifiers
def test_the_tokens_of_all_turns_are_limited(sums):
    rollout, policy = rolled(sums, adds_then_answers, sampling={"max_tokens": 80})
    assert policy.calls == [[0, 1, 2, 3]]
    assert [d.completion.finish_reason for d in rollout.drawn] == ["length"] * 3 + ["stop"]
    assert [drawn.total for drawn in rollout.drawn] == [0.0] * 4


@needs_verifiers
@pytest.mark.parametrize(
    ("harness", "script", "message"),
    [
        ({"edits": True}, adds_then_answers, "the environment changed the conversation"),
        ({"extra": {"temperature": 0.25}}, adds_then_answers, "asks with temperature=0.25"),
        ({"extra": {"messages": "?"}}, adds_then_answers, "the environment failed at task"),
    ],
)
def test_what_cannot_be_trained_on_ends_the_run(sums, harness, script, message):
    """What the other rollouts take down is awaited: processes, sandboxes, folders."""
    agent = {"harness": {"id": sums, **harness}, "runtime": {"type": "subprocess"}}
    with pytest.raises(ToolError, match=message):
        rolled({"taskset": {"id": sums}, "agent": agent}, script)
    tasks = [one for one in gc.get_objects() if isinstance(one, asyncio.Task)]
    assert all(task.done() for task in tasks)


RUN = """
steps = 2
prompts_per_step = 2
tensorboard = false
optimize = false
micro_batch_tokens = 100
log_completions = 8
eval.size = 0
optim.lr = 1e-2
reward.functions = []
sampling = { num_generations = 4, max_tokens = 60 }

[model]
id = "brief"
device = "cpu"
lora = { r = 2, alpha = 8 }

[data.verifiers]
taskset = { id = "sums_env", by_length = true }
agent = { harness = { id = "sums_env", again = true }, runtime = { type = "subprocess" } }
"""


@pytest.fixture
def run_file(sums, tmp_path, monkeypatch):
    """Two turns of every task, by a model that says noise and was taught to be brief."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    torch.manual_seed(0)
    model, tokenizer = load_model("tiny:qwen3:layers=1,hidden=32,heads=1,kv_heads=1,head_dim=32")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        ids = torch.randint(33, 120, (8, 60))
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.2, EOS)
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "brief")
    return "run.toml"


def ranked(rank, port, file):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert main(file, ["run_dir=two", "model.dtype=float64"], json=True) == 0


@needs_verifiers
def test_two_ranks_have_the_numbers_of_one(run_file):
    """Each plays its prompts' rollouts, with an event loop and an endpoint of its own."""
    assert main(run_file, ["run_dir=one", "model.dtype=float64"], json=True) == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    in_processes(ranked, port, run_file)
    for line, other in zip(numbers("one"), numbers("two"), strict=True):
        for name in ("rewards/verifiers/mean", "loss", "grad_norm", "completions/mean_length"):
            assert line[name] == pytest.approx(other[name], rel=1e-12, abs=1e-12)
        assert line["rewards/verifiers/std"] > 0
        assert line["grad_norm"] > 1e-6
    lines = Path("one/completions.jsonl").read_text().splitlines()
    assert max(len(json.loads(text)["turns"]) for text in lines) == 3
    weights = (load_file(f"{run}/final/adapter_model.safetensors") for run in ("one", "two"))
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-12)


@needs_verifiers
@pytest.mark.vllm
def test_vllm_plays(run_file, monkeypatch):
    """A real one, on a CPU: its log-probs of all turns are the trainer's."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    vllm = ["vllm.enforce_eager=true", "vllm.cpu_kv_cache=256MiB", "vllm.max_lora_rank=8"]
    assert main(run_file, ["run_dir=a", "engine=vllm", *vllm], json=True) == 0
    for line in numbers("a"):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
        assert line["rewards/verifiers/std"] > 0


@needs_verifiers
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no_such_env", "taskset 'no_such_env' not found"),
        ({"taskset": {"id": "sums_env"}, "agnet": {}}, "agnet"),
        ({"taskset": {}}, "needs a seed taskset"),
    ],
)
def test_a_wrong_environment_is_named(sums, given, message):
    with pytest.raises(DataError, match=f"(?s)data.verifiers.*{message}"):
        rolled(given, adds_then_answers)


@pytest.mark.skipif(INSTALLED, reason="verifiers is installed")
def test_a_missing_package_is_named():
    with pytest.raises(MissingPackageError, match=r"pip install -e '.*\[verifiers\]'"):
        rolled("any", adds_then_answers)


@pytest.mark.parametrize(
    "tables",
    [
        {"rollout": {"tools": ["x.py:f"]}},
        {"eval": {"path": "x.jsonl"}},
        {"data": {"verifiers": "any", "system": "Be brief."}},
        {"data": {"verifiers": "any", "chat": False}},
    ],
    ids=str,
)
def test_what_an_environment_does_itself_is_not_configured(tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.jsonl").write_text("{}\n")
    (tmp_path / "x.py").write_text("def f():\n    pass\n")
    with pytest.raises(ConfigError, match="verifiers"):
        rolled("any", adds_then_answers, **tables)
