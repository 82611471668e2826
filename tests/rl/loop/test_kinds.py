"""Runs on data as they are (SFT, DPO, KTO) have the loop, files and checkpoints of rollouts."""

import json
from pathlib import Path

import pytest
import torch

from fxrl import Config, losses, optimize
from fxrl.models import load_model, tiny_tokenizer
from fxrl.rl import Trainer
from fxrl.rl.config.load import config_of
from fxrl.rl.loop.batching import make_batches
from fxrl.rl.loop.build import read_data
from fxrl.rl.train import main

TINY = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1"
WORDS = ("one", "two or three", "no", "four, five and six", "all", "none at all", "yes", "who?")
ROWS = [
    {
        "prompt": f"count to {i}",
        "completion": word,
        "chosen": word,
        "rejected": WORDS[i - 1][::-1],
        "label": i % 3 > 0,
    }
    for i, word in enumerate(WORDS)
]
KINDS = ("sft", "dpo", "kto")


def tables(kind, **further):
    """Two micro-batches at least in each step; no compiler."""
    table = {
        "model": {"id": TINY, "device": "cpu", "lora": {"r": 4, "dropout": 0.1}},
        "loss": {"name": kind},
        "optim": {"lr": 1e-2},
        "eval": {"size": 2},
        "data": {"rows": ROWS},
        **{"steps": 4, "save_every": 2, "prompts_per_step": 3, "micro_batch_tokens": 60},
        **{"tensorboard": False, "optimize": False},
    }
    return table | further


def numbers(run_dir):
    lines = [json.loads(text) for text in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in line.items() if "time" not in k and "per_second" not in k}
        for line in lines
    ]


SAYS = {
    "sft": {"mean_token_accuracy", "entropy"},
    "dpo": {"rewards/margins", "rewards/accuracies", "logps/chosen"},
    "kto": {"rewards/margins", "rewards/chosen", "kl"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_an_unbroken_one(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = Trainer(config=tables(kind, run_dir="whole")).train()
    Trainer(config=tables(kind, run_dir="parts", steps=2)).train()
    parts = Trainer(config=tables(kind, run_dir="parts")).train(resume="")
    rest = numbers("parts")
    assert numbers("whole")[2:] == rest[2:]
    same = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    first = numbers("whole")[0]
    assert first.keys() >= SAYS[kind] | {"loss", "grad_norm", "eval/initial_loss"}
    assert first["padding/micro_batches"] > 1
    assert numbers("whole")[-1]["eval/loss"] != first["eval/initial_loss"]
    assert {"held-out loss before", "held-out loss after"} <= whole.summary.keys()
    assert "held-out loss" in Path("whole/run.html").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_change_no_number(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "dtype": "float64", "lora": {"r": 4}}
    found = []
    for tokens in (60, 4096):
        config = tables(kind, steps=2, run_dir=str(tokens), micro_batch_tokens=tokens, model=model)
        Trainer(config=config).train()
        lines = numbers(str(tokens))
        found.append([{k: v for k, v in line.items() if "padding" not in k} for line in lines])
    assert found[0] == [pytest.approx(line, rel=1e-9) for line in found[1]]


def test_all_weights_have_a_frozen_reference(tmp_path, monkeypatch):
    """Without an adapter to switch off; the first margin is 0 on both ways."""
    monkeypatch.chdir(tmp_path)
    for lora in ({"r": 4}, None):
        config = tables("dpo", steps=2, model={"id": TINY, "lora": lora}, run_dir=f"{lora is None}")
        Trainer(config=config).train()
        margins = [line["rewards/margins"] for line in numbers(f"{lora is None}")]
        assert margins[0] == 0
        assert margins[1] != 0


def test_the_command_and_its_callbacks(tmp_path, monkeypatch, capsys):
    """A file, JSON lines, epochs in place of steps."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    Path("run.toml").write_text(
        f'[model]\nid = "{TINY}"\n[data]\npath = "rows.jsonl"\n[loss]\nname = "sft"\n'
    )
    options = ["epochs=1", "optimize=false", "tensorboard=false", "run_dir=a"]
    assert main("run.toml", options, json=True) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in said if line["event"] == "step"] == [1]
    assert any(line.get("text", "").startswith("epochs=1: 1 steps") for line in said)
    assert Path("a/final/model.safetensors").is_file()


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimized_step_is_eager(kind):
    """Loss, metrics and gradients in float64, with the head rewritten and no row left out."""
    model, _ = load_model("tiny:qwen3:layers=1", torch.float64)
    data = read_data(config_of(tables(kind, eval={}), "a", "a"), tiny_tokenizer(), print)
    rows = [row for unit in data.split.train[:4] for row in unit]
    if data.rows_each == 2:
        rows = rows[::2] + rows[1::2]
    [batch] = make_batches(
        rows, [range(len(rows))], pad_token_id=0, device=torch.device("cpu"), dtype=torch.float64
    )
    torch.manual_seed(0)
    batch["ref_logps"] = -5.5 + torch.randn_like(batch["completion_mask"])
    batch["kl"] = torch.tensor(0.3, dtype=torch.float64)
    loss_fn = losses.by_name(kind)
    config = Config(min_saved_bytes=0, compile_regions=False, on_miss="error")
    step, found = optimize(model, loss_fn, config), []
    for call in (lambda: step(batch), lambda: loss_fn(model, batch)):
        model.zero_grad()
        loss, metrics = call()
        loss.backward()
        found.append((loss, metrics, [p.grad for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)
    assert "fuse-linear-logprob" in {r.pass_name for r in step.report.of_kind("applied")}
