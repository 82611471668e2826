"""``fxrl train`` with PPO: its numbers, its value head in files, what does not go with it."""

import copy
import json
import math
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fxrl import Config, losses, optimize
from fxrl.engines.weights.lora.sites import merged_weights
from fxrl.errors import ConfigError, optional
from fxrl.losses import ValueHead
from fxrl.models import load_model, tiny_tokenizer
from fxrl.rl import Trainer
from fxrl.rl.callbacks import Callback
from fxrl.rl.config.load import config_of
from tests.capture.mixer import assert_matches_eager, fixed
from tests.rl.metrics import numbers

TINY = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1"
ROWS = [{"prompt": "so " * (i % 3) + f"count to {i}"} for i in range(8)]
EPSILON, CLIP, VF, ENTROPY = 0.01, 0.05, 0.7, 0.01
LOSS = {
    **{"name": "ppo", "gamma": 0.97, "lam": 0.9, "kl_coef": 0.3, "epsilon": EPSILON},
    **{"cliprange_value": CLIP, "vf_coef": VF, "entropy_coef": ENTROPY},
}


def tables(**further):
    """Several micro-batches and two updates in each step; no compiler."""
    table = {
        "model": {"id": TINY, "device": "cpu", "dtype": "float64", "lora": {"r": 4}},
        "loss": LOSS,
        "data": {"rows": ROWS},
        "reward": {"functions": ["length"], "params": {"length": {"target": 5}}},
        "sampling": {"num_generations": 1, "max_tokens": 8},
        "optim": {"name": "sgd", "lr": 0.02, "max_grad_norm": None},
        **{"steps": 2, "prompts_per_step": 6, "num_iterations": 2, "micro_batch_tokens": 90},
        **{"tensorboard": False, "optimize": False, "engine": "torch"},
    }
    return table | further


def policy(seed=3):
    """A model whose value head knows something."""
    model, _ = load_model(TINY, torch.float64, seed=seed)
    model.value_head = ValueHead(model)
    torch.manual_seed(seed)
    torch.nn.init.normal_(model.value_head.weight, std=0.5)
    return model


class Recorded(Callback):
    """The policy before training, and what each step trains on."""

    def __init__(self):
        self.model, self.steps = None, []

    def on_train_begin(self, config, state, control, *, model, **_):
        self.model = copy.deepcopy(model)

    def on_rollout_end(self, config, state, control, *, rollout, **_):
        self.steps.append([(d.completion, d.total) for d in rollout.drawn])


def tokens_of(model, completion, *, values=True):
    """log-probs, entropies and values of one completion's tokens, one sequence at a time."""
    prompt, drawn = list(completion.prompt_token_ids), list(completion.token_ids)
    out = model(input_ids=torch.tensor([prompt + drawn]), output_hidden_states=values)
    logps = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    own = logps[range(len(drawn)), drawn]
    entropy = -(logps.exp() * logps).sum(-1)
    if not values:
        return own, entropy, None
    head = model.value_head
    hidden = out.hidden_states[-1][0, len(prompt) - 1 : -1]
    return own, entropy, hidden @ head.weight[0] + head.bias[0]


def judged(old, refs, totals):
    """Advantages (whitened) and returns of a step, from the definitions."""
    gamma, lam, kl_coef = LOSS["gamma"], LOSS["lam"], LOSS["kl_coef"]
    found, returns = [], []
    for (logps, _, values), ref, total in zip(old, refs, totals, strict=True):
        n, v = len(logps), [*values.tolist(), 0.0]
        rewards = [-kl_coef * float(logps[t] - ref[t]) for t in range(n)]
        rewards[-1] += total
        deltas = [rewards[t] + gamma * v[t + 1] - v[t] for t in range(n)]
        own = [sum((gamma * lam) ** (j - t) * deltas[j] for j in range(t, n)) for t in range(n)]
        found.append(own)
        returns.append([a + b for a, b in zip(own, v, strict=False)])
    flat = [a for own in found for a in own]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1))
    return [[(a - mean) / (std + 1e-4) for a in own] for own in found], returns


def loss_by_hand(model, step, old, advantages, returns):
    """Token by token, all completions of the step as one batch."""
    policy_term = value_term = bonus = 0.0
    num = sum(len(a) for a in advantages)
    for (completion, _), (old_logps, _, old_values), own, wanted in zip(
        step, old, advantages, returns, strict=True
    ):
        logps, entropy, values = tokens_of(model, completion)
        for t in range(len(own)):
            ratio = (logps[t] - old_logps[t]).exp()
            clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            policy_term = policy_term - torch.minimum(ratio * own[t], clipped * own[t])
            near = old_values[t] + (values[t] - old_values[t]).clamp(-CLIP, CLIP)
            errors = ((values[t] - wanted[t]) ** 2, (near - wanted[t]) ** 2)
            value_term = value_term + torch.maximum(*errors) / 2
            bonus = bonus + entropy[t]
    return (policy_term + VF * value_term - ENTROPY * bonus) / num


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_two_steps_of_two_updates_are_those_of_an_eager_loop(adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded = Recorded()
    model = {"id": policy(), "dtype": "float64", "lora": adapter}
    given = {"callbacks": [recorded], "tokenizer": tiny_tokenizer()}
    trained = Trainer(config=tables(model=model, run_dir="a"), **given).train().model
    own = recorded.model
    frozen = copy.deepcopy(own)
    parameters = [p for p in own.parameters() if p.requires_grad]
    assert any(p is own.value_head.weight for p in parameters)
    optimizer = torch.optim.SGD(parameters, lr=0.02)
    lines = numbers("a")
    for step, line in zip(recorded.steps, lines, strict=True):
        with torch.no_grad():
            own.eval()
            old = [tokens_of(own, completion) for completion, _ in step]
            with frozen.disable_adapter() if adapter else nullcontext():
                refs = [tokens_of(frozen, completion, values=False)[0] for completion, _ in step]
        gaps = torch.cat([o[0] - r for o, r in zip(old, refs, strict=True)])
        advantages, returns = judged(old, refs, [total for _, total in step])
        assert line["kl"] == pytest.approx(float(gaps.mean()), abs=1e-12)
        r = torch.tensor([x for each in returns for x in each], dtype=torch.float64)
        v = torch.cat([o[2] for o in old])
        assert line["explained_variance"] == pytest.approx(float(1 - (r - v).var() / r.var()))
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = loss_by_hand(own, step, old, advantages, returns)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert line["loss"] == pytest.approx(sum(found) / 2, rel=1e-9)
        assert line["padding/micro_batches"] > 1
    assert lines[1]["kl"] != 0
    assert all(lines[0][name] > 0 for name in ("value_clip_ratio", "clip_ratio/region_mean"))
    same = zip(trained.named_parameters(), own.parameters(), strict=True)
    for (name, theirs), ours in same:
        torch.testing.assert_close(theirs, ours, rtol=1e-8, atol=1e-11, msg=name)


def test_micro_batches_change_no_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = []
    for size in (90, 4096):
        Trainer(config=tables(micro_batch_tokens=size, run_dir=str(size))).train()
        found.append(numbers(str(size), "padding", "engine/"))
    assert found[0] == [pytest.approx(line, rel=1e-9) for line in found[1]]


@pytest.mark.parametrize("adapter", [None, {"r": 4, "dropout": 0.1}])
def test_a_resumed_run_is_an_unbroken_one(adapter, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "device": "cpu", "lora": adapter}
    further = {"model": model, "optim": {"lr": 1e-2}, "save_every": 2}
    whole = Trainer(config=tables(steps=3, run_dir="whole", **further)).train()
    Trainer(config=tables(steps=2, run_dir="parts", **further)).train()
    parts = Trainer(config=tables(steps=3, run_dir="parts", **further)).train(resume="")
    assert numbers("whole", "engine/")[2:] == numbers("parts", "engine/")[2:]
    same = zip(whole.model.parameters(), parts.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert whole.model.value_head.weight.abs().max() > 0
    page = Path("whole/run.html").read_text()
    assert all(words in page for words in ("value loss", "variance that the values explain"))


@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_the_value_head_is_a_file_beside_the_model(adapter, tmp_path, monkeypatch):
    """Who loads the model finds what it knows, and nothing else; an engine gets none of it."""
    monkeypatch.chdir(tmp_path)
    model = {"id": TINY, "device": "cpu", "lora": adapter}
    trained = Trainer(config=tables(steps=1, save_every=1, model=model, run_dir="a")).train().model
    for folder in ("a/final", "a/checkpoints/step-00000001"):
        held = load_file(Path(folder, "value_head.safetensors"))
        assert held.keys() == {"value_head.weight", "value_head.bias"}
        fresh, _ = load_model(TINY)
        fresh.value_head = ValueHead(fresh)
        assert fresh.load_state_dict(held, strict=False).unexpected_keys == []
        assert torch.equal(fresh.value_head.weight, trained.value_head.weight)
        assert not Path(folder, "trainable.safetensors").exists()
        others = [
            f for f in Path(folder).glob("*.safetensors") if f.name != "value_head.safetensors"
        ]
        assert [name for f in others for name in load_file(f) if "value" in name] == []
    if adapter is None:
        index = json.loads(Path("a/final/model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == {"model.safetensors"}
        load = optional("transformers", "a test").AutoModelForCausalLM.from_pretrained
        loaded, info = load("a/final", output_loading_info=True)
        assert not any(info[key] for key in ("unexpected_keys", "missing_keys"))
        assert torch.equal(loaded.lm_head.weight, trained.lm_head.weight)
    plain, _ = load_model(TINY)
    assert {name for name, _ in merged_weights(trained)} == {n for n, _ in merged_weights(plain)}


def test_the_optimized_step_is_eager():
    """Loss, metrics and gradients in float64; the head is rewritten, layers are captured once and
    run again in the backward, and there is one forward."""
    model, _ = load_model(f"{TINY},layers=2".replace("layers=1,", ""), torch.float64)
    model.train()
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)()
    model.config.use_cache = False
    model.value_head = ValueHead(model)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)
    shape = (3, 7)
    drawn = {k: torch.randn(shape).double() for k in ("advantages", "returns", "values")}
    mask = torch.ones(shape).double()
    mask[0, 4:] = 0
    ids = torch.randint(5, 60, (3, 12))
    batch = {"input_ids": ids, "completion_mask": mask, "right_padded": True, **drawn}
    batch["old_logps"] = -5.5 + 0.3 * torch.randn(shape).double()
    calls = []
    layer = model.get_output_embeddings()
    loss_fn = losses.ppo(vf_coef=0.5)
    passes = ("fuse-linear-logprob", "outline-layers", "recompute")
    config = Config(min_saved_bytes=0, compile_regions=False, on_miss="error", passes=passes)
    step = optimize(model, loss_fn, config)
    (_, metrics), _ = assert_matches_eager(step, loss_fn, model, fixed(batch))
    assert {*passes} <= {r.pass_name for r in step.report.of_kind("applied")}
    assert any("2 layers were captured as 1" in r.reason for r in step.report.remarks)
    assert metrics["value_loss"] > 0
    with layer.register_forward_hook(lambda *_: calls.append(1)):
        loss_fn(model, batch)
    assert calls == [1]
    assert model.value_head._heard is None, "a hidden state would be held until the next step"


def test_what_has_no_reward_is_not_trained_on(tmp_path, monkeypatch):
    """And where nothing has one, there is no update, and it is told."""
    monkeypatch.chdir(tmp_path)
    told = []

    def short(completion_ids, **_):
        return [1.0 if len(ids) < 8 else None for ids in completion_ids]

    def none(completion_ids, **_):
        return [None] * len(completion_ids)

    for name, function in (("some", short), ("none", none)):
        recorded = Recorded()
        config = tables(reward={"functions": [function]}, run_dir=name, steps=3)
        Trainer(config=config, callbacks=[recorded]).train()
        told.append([len(step) for step in recorded.steps])
    assert all(0 <= number < 6 for number in told[0])
    assert told[1] == [0, 0, 0]
    assert [line["loss"] for line in numbers("none")] == [None] * 3


@pytest.mark.parametrize(
    ("further", "words"),
    [
        ({"loss": LOSS | {"vf_coef": -0.1}}, "vf_coef=-0.1 must be a number at least 0"),
        ({"loss": LOSS | {"gamma": 1.5}}, r"gamma=1.5 is outside \[0, 1\]"),
        ({"loss": LOSS | {"lam": -0.5}}, r"lam=-0.5 is outside \[0, 1\]"),
        ({"loss": LOSS | {"kl_coef": -1}}, "kl_coef=-1.0 is below 0"),
        ({"loss": {"name": "ppo", "cliprange": 0.1}}, "cliprange: no such key; did you mean 'ep"),
        ({"advantages": "group"}, "advantages='group' compares completions of a prompt, and"),
        ({"scale_rewards": "batch"}, "scale_rewards='batch' compares completions of a prompt"),
        ({"dynamic_sampling": "drop"}, "dynamic_sampling='drop' compares completions of a"),
        ({"data": {"rows": ROWS, "form": "pairs"}}, "loss.name='ppo' reads prompts"),
        ({"loss": {"name": "grpo"}}, "sampling.num_generations=1: loss.name='grpo' compares a"),
    ],
)
def test_what_does_not_go_with_it(further, words):
    with pytest.raises(ConfigError, match=words):
        config_of(tables(**further), "a", "a")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("adapter", [None, {"r": 4}])
def test_on_a_gpu(adapter, tmp_path, monkeypatch):
    """Compiled, an adapter on bfloat16 weights; the first update is of the policy that drew."""
    monkeypatch.chdir(tmp_path)
    dtype = "bfloat16" if adapter else "float32"
    model = {"id": "tiny:qwen3:layers=4,hidden=256", "dtype": dtype, "lora": adapter}
    model |= {"device": "cuda", "gradient_checkpointing": True}
    further = {"num_iterations": 1, "optimize": True, "optim": {"lr": 1e-3}, "steps": 3}
    further["fxrl"] = {"min_saved_bytes": 0, "on_miss": "error"}
    trained = Trainer(config=tables(model=model, run_dir="a", **further)).train().model
    assert trained.value_head.weight.dtype == torch.float32
    assert trained.value_head.weight.abs().max() > 0
    for line in numbers("a"):
        assert line["clip_ratio/region_mean"] == 0
        assert line["value_loss"] > 0
    applied = {r["pass_name"] for r in json.loads(Path("a/run.json").read_text())["report"]}
    assert "fuse-linear-logprob" in applied
