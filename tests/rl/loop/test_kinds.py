"""Runs on data as they are (SFT, DPO, ...) have the loop and files of rollouts."""

import json
from pathlib import Path

import pytest
import torch

from fxrl import Config, losses, optimize
from fxrl.errors import ConfigError, optional
from fxrl.models import ModelError, load_model, tiny_tokenizer
from fxrl.models.load import write_model
from fxrl.rl import Trainer
from fxrl.rl.config.load import config_of
from fxrl.rl.errors import CheckpointError
from fxrl.rl.loop.batching import make_batches
from fxrl.rl.loop.data import read_data
from fxrl.rl.loop.precomputed import FILE
from fxrl.rl.train import main
from tests.capture.mixer import assert_matches_eager, fixed
from tests.forked import need_autograd_in_forks
from tests.rl.loop.rank_cases import group
from tests.rl.metrics import numbers
from tests.rows import rows

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
KINDS = ("sft", "distill", "dpo", "kto", "reward_model")
TEACHER = "tiny:llama:layers=1,hidden=48,vocab=322"


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
    if kind == "distill":
        table["teacher"] = {"id": TEACHER, "dtype": "float64"}
    return table | further


SAYS = {
    "reward_model": {"rewards/margins", "rewards/accuracies", "rewards/chosen"},
    "distill": {"entropy", "teacher_entropy"},
    "sft": {"mean_token_accuracy", "entropy"},
    "dpo": {"rewards/margins", "rewards/accuracies", "logps/chosen"},
    "kto": {"rewards/margins", "rewards/chosen", "kl"},
}


#: What a run does with a kind it does with another, too: pairs, single rows, a teacher.
@pytest.mark.parametrize("kind", rows(KINDS, ["sft", "kto", "reward_model"]))
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


@pytest.mark.parametrize("kind", rows(KINDS, ["sft", "reward_model"]))
def test_micro_batches_change_no_number(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "dtype": "float64", "lora": {"r": 4}}
    found = []
    for tokens in (60, 4096):
        config = tables(kind, steps=2, run_dir=str(tokens), micro_batch_tokens=tokens, model=model)
        Trainer(config=config).train()
        found.append(numbers(str(tokens), "padding"))
    assert found[0] == [pytest.approx(line, rel=1e-9) for line in found[1]]


def test_a_rank_without_rows_changes_no_number(tmp_path, monkeypatch):
    """Of three ranks one has none, in training and in evaluation."""
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "device": "cpu", "dtype": "float64", "lora": {"r": 4}}
    config = tables("kto", steps=2, prompts_per_step=2, model=model)

    def run(run_dir):
        Trainer(config=config | {"run_dir": run_dir}).train()

    need_autograd_in_forks()
    ran = group(3, run, "three")
    assert ran["codes"] == [0, 0, 0], ran["said"]
    run("one")
    one, three = (numbers(name, "ranks") for name in ("one", "three"))
    assert three == [pytest.approx(line, rel=1e-9, abs=1e-12) for line in one]


def test_all_weights_have_a_frozen_reference(tmp_path, monkeypatch):
    """Without an adapter to switch off; the first margin is 0 on both ways."""
    monkeypatch.chdir(tmp_path)
    for lora in ({"r": 4}, None):
        config = tables("dpo", steps=2, model={"id": TINY, "lora": lora}, run_dir=f"{lora is None}")
        Trainer(config=config).train()
        margins = [line["rewards/margins"] for line in numbers(f"{lora is None}")]
        assert margins[0] == 0
        assert margins[1] != 0


@pytest.mark.parametrize(
    ("kind", "lora"),
    [pytest.param("dpo", {"r": 4}, marks=pytest.mark.slow), ("dpo", None), ("kto", {"r": 4})],
)
def test_a_reference_that_is_asked_beforehand(kind, lora, tmp_path, monkeypatch):
    """The numbers of one that is asked in each step; a resumed run has those of the file."""
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "lora": lora, "dtype": "float64"}
    Trainer(config=tables(kind, run_dir="each", model=model)).train()
    before = {"model": model, "precompute_ref_log_probs": True}
    Trainer(config=tables(kind, run_dir="once", steps=2, **before)).train()
    path = Path("once", FILE)
    kept = path.read_bytes()
    Trainer(config=tables(kind, run_dir="once", **before)).train(resume="")
    found, wanted = numbers("once"), numbers("each")
    assert found == [pytest.approx(line, rel=1e-9) for line in wanted]
    assert found[0].get("rewards/margins") == pytest.approx(0.0, abs=1e-12)
    assert path.read_bytes() == kept


def test_a_reference_of_another_run_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tables("dpo", run_dir="a", steps=1, precompute_ref_log_probs=True)
    Trainer(config=config).train()
    kept = Path("a", FILE).read_bytes()
    damaged = kept[:-1] + bytes([kept[-1] ^ 1])
    another = config | {"data": {"rows": ROWS[::-1]}}
    for given, content, words in (
        (config, damaged, "is damaged: its values are not those written; remove b/"),
        (config, kept[:99], "cannot be read"),
        (another, kept, "another run's log-probs:\n  rows: was 16 rows, .*; is 16 rows, "),
    ):
        Path("b").mkdir(exist_ok=True)
        Path("b", FILE).write_bytes(content)
        with pytest.raises(CheckpointError, match=words):
            Trainer(config=given | {"run_dir": "b"}).train()
        assert Path("b", FILE).read_bytes() == content


def test_distillation_on_the_models_own_completions(tmp_path, monkeypatch):
    """The reward is told and moves nothing: another one makes the same model."""
    monkeypatch.chdir(tmp_path)
    models = []
    for target in (1, 4):
        config = tables("distill", steps=2, run_dir=f"own-{target}", eval={})
        config["data"] |= {"form": "prompts"}
        config["sampling"] = {"num_generations": 2, "max_tokens": 4}
        config["reward"] = {"functions": ["length"], "params": {"length": {"target": target}}}
        models.append(Trainer(config=config).train().model)
        assert numbers(f"own-{target}")[0].keys() >= {"reward", "teacher_entropy", "loss"}
    same = zip(*(model.parameters() for model in models), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    teacher, tokenizer = load_model(TEACHER)
    write_model(teacher, tokenizer, Path("swapped"))
    file = Path("swapped/tokenizer.json")
    found = json.loads(file.read_text())
    vocab = found["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(found))
    trainer = Trainer(config=tables("distill", teacher={"id": "swapped"}))
    with pytest.raises(ModelError, match=r"teacher.id='swapped': 2 of the .* have other ids"):
        trainer.train()


@pytest.mark.parametrize(
    ("table", "words"),
    [
        (
            {"loss": {"name": "distill"}},
            "teacher: loss.name='distill' needs one; add \\[teacher\\]",
        ),
        ({"teacher": {"id": TINY}}, "teacher: loss.name='sft' compares with none; leave it out"),
        ({"loss": {"name": "distill", "teacher": TINY}}, "loss.teacher: no such key"),
        ({"teacher": {"id": "tiny:qwen9"}}, "teacher.id: "),
    ],
)
def test_what_is_wrong_with_a_teacher(table, words):
    with pytest.raises(ConfigError, match=words):
        config_of(tables("sft") | table, "a", "a")


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_a_reward_model_is_a_sequence_classifier(lora, tmp_path, monkeypatch):
    """It prefers what it was shown; transformers and PEFT load it, and give the same rewards."""
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "lora": lora}
    rows = [{"prompt": word, "chosen": "yes", "rejected": "never"} for word in WORDS]
    data, optim = {"rows": rows}, {"lr": 3e-3}
    config = tables("reward_model", steps=12, run_dir="a", model=model, optim=optim, data=data)
    trained = Trainer(config=config).train()
    lines = numbers("a")
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"] + 0.5
    if lora:
        load = optional("peft", "a test").AutoPeftModelForSequenceClassification
    else:
        load = optional("transformers", "a test").AutoModelForSequenceClassification
    loaded = load.from_pretrained("a/final", num_labels=1)
    ids = trained.tokenizer(["so it is", "no"], padding=True, return_tensors="pt").input_ids
    with torch.no_grad():
        rewards = [one.eval()(ids).logits for one in (trained.model, loaded)]
    assert rewards[0].shape == (2, 1)
    torch.testing.assert_close(*rewards)


def test_a_new_head_on_half_precision_is_trained_in_float32(tmp_path, monkeypatch):
    """As adapters are: bfloat16 would lose small updates."""
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "dtype": "bfloat16", "lora": {"r": 4}}
    config = tables("reward_model", steps=2, run_dir="a", model=model, eval={})
    trained = Trainer(config=config).train().model
    assert {p.dtype for p in trained.parameters() if p.requires_grad} == {torch.float32}
    assert numbers("a")[1]["rewards/margins"] != numbers("a")[0]["rewards/margins"]


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


@pytest.mark.parametrize("beta", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_distilling_under_a_frozen_head_is_eager(beta):
    """Its tiles make the gradients too: one, or one of each divergence from the mixture."""
    model, _ = load_model("tiny:qwen3:layers=1", torch.float64)
    model.lm_head.weight.requires_grad_(False)
    teacher, _ = load_model(TEACHER, torch.float64)
    ids = torch.randint(3, 200, (3, 12))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
    loss_fn = losses.distill(teacher, beta)
    config = Config(min_saved_bytes=0, compile_regions=False, passes=("chunk-vocab-region",))
    step = optimize(model, loss_fn, config)
    assert_matches_eager(step, loss_fn, model, fixed(batch))
    with torch.no_grad():
        step(batch)
    for capture, cut in zip(step.captures, ("vectors", "inputs"), strict=True):
        assert [kernels.region.cut for kernels in capture.kernels.values()] == [cut]


@pytest.mark.parametrize("kind", rows(KINDS, ["sft", "kto"]))
def test_the_optimized_step_is_eager(kind):
    """Loss, metrics and gradients in float64, with the head rewritten and no row left out."""
    scores = kind == "reward_model"
    model, _ = load_model("tiny:qwen3:layers=1", torch.float64, scalar_head=scores)
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
    given = {}
    if kind == "distill":
        given["teacher"], _ = load_model(TEACHER, torch.float64)
    loss_fn = losses.by_name(kind, **given)
    config = Config(min_saved_bytes=0, compile_regions=False, on_miss="error")
    step = optimize(model, loss_fn, config)
    assert_matches_eager(step, loss_fn, model, fixed(batch))
    if not scores:  # which has no vocabulary
        rewritten = "chunk-vocab-region" if kind == "distill" else "fuse-linear-logprob"
        assert rewritten in {r.pass_name for r in step.report.of_kind("applied")}
    assert all(p.grad is None for module in given.values() for p in module.parameters())
