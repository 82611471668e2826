"""``fxrl.optimize``: what it refuses, before anything runs."""

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fxrl
from fxrl.errors import ConfigError, FxrlError


def loss_fn(model, batch):
    return model(batch).sum()


#: Options that a pass does not take, for each what is said of them.
PASS_OPTIONS = (
    ({"fp8-lore": {}}, "pass_options: 'fp8-lore' is unknown; did you mean 'fp8-lora'"),
    ({"fp8-lora": {"recip": "row"}}, "fp8-lora has no option 'recip'; did you mean 'recipe'"),
    ({"fp8-lora": {"enabled": True}}, "fp8-lora has no option 'enabled'"),
    ({"recompute": {"enabled": True}}, "recompute has no option 'enabled'$"),
    ({"fp8-lora": {"recipe": "rows"}}, "recipe='rows' is not one of 'row', 'block', 'tensor'"),
    ({"fp8-lora": {"skip": "k_proj"}}, "fp8-lora.skip='k_proj' is not a list, each entry a text"),
    ({"fp8-lora": {"skip": [1]}}, r"fp8-lora.skip=\[1\] is not a list, each entry a text"),
    ({"fp8-lora": {"heads": 1}}, "fp8-lora.heads=1 is not true or false"),
    ({"fp8-lora": {"least_values": True}}, "least_values=True is not a whole number"),
    ({"factor-masks": {"least_mask": 3}}, "least_mask=3 is not a table"),
)

#: Likewise of Inductor.
INDUCTOR_OPTIONS = (
    ({"nope": 1}, "inductor: 'nope' is no option of torch._inductor.config$"),
    ({"cudagraphs": True}, "'cudagraphs' is no option.*; did you mean 'triton.cudagraphs'"),
    ({"max_autotune": "yes"}, "inductor: max_autotune='yes' is not true or false"),
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("qwen3", loss_fn), "model is a str"),
        ((torch.nn.Linear(2, 2), "grpo"), "loss_fn is a str"),
        ((torch.nn.Linear(2, 2), loss_fn, {}), r"config is a dict; .* fxrl\.Config\("),
        (
            (torch.nn.Linear(2, 2), loss_fn, fxrl.Config(passes=("fuse-logprob",))),
            "passes: 'fuse-logprob' is unknown; did you mean 'fuse-linear-logprob'",
        ),
        *(
            ((torch.nn.Linear(2, 2), loss_fn, fxrl.Config(pass_options=told)), words)
            for told, words in PASS_OPTIONS
        ),
        *(
            (
                (torch.nn.Linear(2, 2), loss_fn, fxrl.Config(inductor=told, compile_regions=False)),
                words,
            )
            for told, words in INDUCTOR_OPTIONS
        ),
    ],
)
def test_a_wrong_argument_is_named_at_once(arguments, words):
    with pytest.raises(ConfigError, match=words):
        fxrl.optimize(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"chunk_token": 8}, "no option 'chunk_token'; did you mean 'chunk_tokens'"),
        ({"xyzzy": 8}, "no option 'xyzzy'; known: chunk_tokens, compile_regions"),
        ({"chunk_tokens": "a"}, "chunk_tokens='a' is not a whole number"),
        ({"chunk_tokens": 2.5}, "chunk_tokens=2.5 is not a whole number"),
        ({"chunk_tokens": True}, "chunk_tokens=True is not a whole number"),
        ({"chunk_tokens": 0}, "chunk_tokens=0 is below 1; use None"),
        ({"min_saved_bytes": "much"}, "min_saved_bytes='much' is not a size; .*'75GiB'"),
        ({"min_saved_bytes": "1.2.3GiB"}, "is not a size"),
        ({"min_saved_bytes": "-1GiB"}, "min_saved_bytes='-1GiB' is negative"),
        ({"min_saved_bytes": None}, "min_saved_bytes=None is not a whole .* write bytes or .75GiB"),
        ({"gpu_memory": "75 GiBs"}, "gpu_memory='75 GiBs' is not a size"),
        ({"host_memory": -1}, "host_memory=-1 is negative"),
        ({"compile_regions": "no"}, "compile_regions='no' is not true or false"),
        ({"inductor": 3}, "inductor=3 is not a table"),
        ({"passes": "recompute"}, r"passes='recompute' is not a list"),
        ({"passes": 3}, "passes=3 is not a list"),
        ({"on_miss": "shout"}, "on_miss='shout' is not one of 'warn'"),
        ({"precision": ["bf16"]}, "precision=.*is not one of"),
    ],
)
def test_a_wrong_option_is_named_with_its_cure(options, words):
    with pytest.raises(ConfigError, match=words):
        fxrl.Config(**options)


@pytest.mark.parametrize(
    ("given", "wanted"), [("32MiB", 2**25), ("1.5 GB", 15 * 10**8), ("7", 7), (0, 0)]
)
def test_sizes_may_be_text(given, wanted):
    config = fxrl.Config(min_saved_bytes=given, gpu_memory=given, host_memory=given)
    assert config.min_saved_bytes == wanted
    assert pickle.loads(pickle.dumps(config)) == copy.copy(config) == config


def test_a_loss_without_a_tensor_is_named():
    step = fxrl.optimize(torch.nn.Linear(2, 2), lambda model, batch: None)
    with pytest.raises(FxrlError, match=r"returned None, which holds no tensor; return the loss"):
        step(torch.randn(3, 2))


@dataclass
class Losses:
    loss: torch.Tensor
    metrics: dict[str, float]


def test_a_loss_may_be_returned_in_a_dataclass():
    model, x = torch.nn.Linear(2, 2), torch.randn(3, 2)
    found = fxrl.optimize(model, lambda model, x: Losses(model(x).square().sum(), {"a": 1.0}))(x)
    assert found.metrics == {"a": 1.0}
    wanted = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    torch.testing.assert_close(torch.autograd.grad(found.loss, [*model.parameters()]), wanted)


class MineError(Exception):
    pass


def shape_bug(model, batch):
    return (model(batch["x"]).log_softmax(-1) + batch["x"]).sum()


def wrong_key(model, batch):
    return model(batch["y"]).sum()


def key_behind_a_head(model, batch):
    logp = model(batch["x"]).log_softmax(-1).gather(-1, batch["x"].long().abs() % 7)
    return -(logp * batch["y"]).sum()


def raising(model, batch):
    model(batch["x"])
    raise MineError("no")


@pytest.mark.parametrize(
    ("loss", "error"),
    [
        (shape_bug, RuntimeError),
        (wrong_key, KeyError),
        (key_behind_a_head, KeyError),
        (raising, MineError),
    ],
)
@pytest.mark.filterwarnings("error")  # nothing else is said
def test_the_users_own_error_comes_from_the_users_own_line(loss, error):
    model, batch = torch.nn.Linear(3, 7), {"x": torch.randn(2, 3)}
    with pytest.raises(error) as eager:
        loss(model, batch)
    with pytest.raises(error) as found:
        fxrl.optimize(model, loss)(batch)
    assert type(found.value) is type(eager.value)
    assert str(found.value) == str(eager.value)
    assert found.traceback[-1].lineno == eager.traceback[-1].lineno
    assert found.value.__cause__ is None
    assert found.value.__suppress_context__ or found.value.__context__ is None


def test_a_step_without_a_loss_head_is_the_loss_itself():
    model = torch.nn.Linear(3, 2)
    batch = torch.randn(4, 3)
    step = fxrl.optimize(model, loss_fn)
    loss = step(batch)
    torch.testing.assert_close(loss, loss_fn(model, batch), rtol=0, atol=0)
    assert step.report.remarks == ()


def test_a_graph_that_cannot_be_lowered_keeps_its_checkpointing(monkeypatch):
    """It runs as written, the report says why, and checkpointed bodies still save nothing."""

    def broken(*args, **kwargs):
        raise NotImplementedError("no lowering today")

    monkeypatch.setattr("fxrl.compile.backend.lower", broken)
    model = torch.nn.Linear(3, 7)

    def checkpointed(model, batch):
        return checkpoint(lambda x: model(x).exp().sin(), batch, use_reentrant=False).sum()

    batch = torch.randn(4, 3)
    step = fxrl.optimize(model, checkpointed, fxrl.Config(on_miss="ignore"))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = step(batch)
    assert not [t for t in saved if t.shape == (4, 7)]
    (remark,) = step.report.of_kind("missed")
    assert "no lowering today" in remark.reason
    found = torch.autograd.grad(loss, model.weight)
    truth = torch.autograd.grad(checkpointed(model, batch), model.weight)
    torch.testing.assert_close(found, truth)
