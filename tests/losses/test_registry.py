"""A loss by its name, and what a wrong name or keyword is told."""

import functools
import inspect
import math
from dataclasses import fields

import pytest
import torch
from loss_models import FreeLogits, random_batch

from fxrl import losses
from fxrl.losses.options import PolicyKeywords, PolicyOptions, accepted


def test_the_losses():
    policy = {"grpo", "dr_grpo", "dapo", "bnpo", "gspo", "luspo", "cispo", "sapo"}
    others = {"reinforce", "rloo", "ppo", "dpo", "kto", "sft", "distill", "reward_model"}
    assert set(losses.FACTORIES) == policy | others
    for name, factory in losses.FACTORIES.items():
        assert getattr(losses, name) is factory
        assert inspect.getdoc(factory)


def test_defaults_are_trl():
    names = {p.name: p.default for p in inspect.signature(losses.grpo).parameters.values()}
    options = PolicyOptions()
    assert (names["epsilon"], names["epsilon_high"], names["delta"]) == (0.2, None, None)
    assert (options.beta, options.temperature, options.entropy_coef) == (0.0, 1.0, 0.0)
    assert options.vllm_importance_sampling_mode == "sequence_mask"
    assert options.vllm_importance_sampling_clip_max == 3.0


def test_typed_keywords_are_the_options():
    assert list(PolicyKeywords.__annotations__) == [f.name for f in fields(PolicyOptions)]
    assert set(PolicyKeywords.__annotations__) < set(accepted(losses.grpo))


def test_by_name_is_the_factory():
    batch, logits = random_batch()
    values = [
        loss_fn(FreeLogits(logits), batch)[0]
        for loss_fn in (losses.by_name("dapo", beta=0.2), losses.dapo(beta=0.2))
    ]
    assert torch.equal(*values)
    assert not torch.equal(values[0], losses.dapo()(FreeLogits(logits), batch)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: losses.by_name("drgrpo"), "'drgrpo'; did you mean 'dr_grpo'"),
        (lambda: losses.by_name("xyzzy"), "'xyzzy'; known: bnpo, cispo"),
        (lambda: losses.by_name("grpo", betta=1), "'betta'; did you mean 'beta'"),
        (lambda: losses.grpo(betta=1), "grpo has no keyword 'betta'; did you mean 'beta'"),
        (lambda: losses.ppo(cliprange=1), "ppo has no keyword 'cliprange'; did you mean 'clip"),
        (lambda: losses.dpo(bta=1), "dpo has no keyword 'bta'; did you mean 'beta'"),
        (lambda: losses.by_name("sft", beta=1), "sft has no keyword 'beta'"),
        (lambda: losses.grpo(kl_estimator="k4"), "kl_estimator='k4' is not one of"),
        (lambda: losses.grpo(importance_sampling_level="seq"), "did you mean 'sequence'"),
        (lambda: losses.grpo(vllm_importance_sampling_mode="mask"), "is not one of"),
        (lambda: losses.grpo(epsilon=-0.1), "epsilon=-0.1 must be a number at least 0"),
        (lambda: losses.grpo(epsilon="a"), "epsilon='a' must be a number"),
        (lambda: losses.grpo(delta=1.1), r"delta=1.1 must be above 1 \+ epsilon_high"),
        (lambda: losses.grpo(temperature=0), "temperature=0.0 must be above 0"),
        (lambda: losses.grpo(beta=-1), "beta=-1"),
        (lambda: losses.grpo(top_entropy_quantile=2), "top_entropy_quantile=2.0 is outside"),
        (lambda: losses.grpo(vllm_importance_sampling_clip_min=4.0), "above _clip_max=3.0"),
        (lambda: losses.dr_grpo(max_completion_length=0), "max_completion_length=0"),
        (lambda: losses.cispo(epsilon_high=0), "epsilon_high=0"),
        (lambda: losses.sapo(sapo_temperature_neg=0), "sapo_temperature_neg=0"),
        (lambda: losses.ppo(cliprange_value=0), "cliprange_value=0"),
        *(
            (lambda key=key, bad=bad: losses.by_name("dapo", **{key: bad}), f"^{key}=")
            for key in PolicyKeywords.__annotations__
            for bad in ("0.01", math.nan, math.inf, [])
        ),
        (lambda: losses.grpo(entropy_coef=True), "entropy_coef=True is not a number"),
        (lambda: losses.grpo(log_entropy=1), "log_entropy=1 is not true or false"),
        (lambda: losses.grpo(temperature=None), "temperature=None is not a number"),
        (lambda: losses.sft(log_accuracy="no"), "log_accuracy='no' must be true or false"),
        (lambda: losses.distill(beta=1.5), r"beta=1.5 must be in \[0, 1\]"),
        (lambda: losses.distill("gpt2"), "teacher='gpt2' is no model; give the module itself"),
        (lambda: losses.distill(temperature=0), "temperature=0 must be a number above 0"),
        (lambda: losses.dpo(reference_free="no"), "reference_free='no' must be true or false"),
        (lambda: losses.dpo(label_smoothing="x"), "label_smoothing='x' must be a finite"),
        (lambda: losses.by_name("nowhere.mine:f"), "importing 'nowhere.mine' failed"),
        (lambda: losses.by_name("math:sinn"), "math has no function 'sinn'; did you mean 'sin"),
        (lambda: losses.by_name("nowhere.py:f"), "'nowhere.py' is not a file"),
    ],
)
def test_what_is_wrong_is_told(call, message):
    with pytest.raises(losses.LossConfigError, match=message):
        call()


@pytest.mark.parametrize(
    ("loss_fn", "over", "clips", "advantages", "scale"),
    [
        (losses.grpo(), "sequences", False, "group", "group"),
        (losses.gspo(), "sequences", True, "group", "group"),
        (losses.bnpo(), "tokens", False, "group", "group"),
        (losses.dapo(), "update", False, "group", "group"),
        (losses.dapo(importance_sampling_level="sequence"), "update", True, "group", "group"),
        (losses.cispo(), "update", False, "group", "group"),
        (losses.dr_grpo(), "sequences", False, "group", "none"),
        (losses.rloo(), "sequences", True, "leave_one_out", "group"),
        (losses.ppo(), "tokens", False, "group", "group"),
        (functools.partial(losses.bnpo(), "model"), "tokens", False, "group", "group"),
        (lambda model, batch: None, "sequences", False, "group", "group"),
    ],
)
def test_a_loss_tells_of_itself(loss_fn, over, clips, advantages, scale):
    info = losses.loss_info(loss_fn)
    assert info.mean_over == over
    assert ("clip_ratio/high_mean" in info.per_sequence) is clips
    assert (info.advantages, info.scale_rewards) == (advantages, scale)


MINE = """
def direct(model, batch):
    return model, batch

def bound(model, batch, scale=1):
    return model, batch * scale

def factory(scale=2):
    return lambda model, batch: (model, batch * scale)

def odd(one):
    return one
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "my_losses_for_fxrl.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "my_losses_for_fxrl.py"


@pytest.mark.parametrize("as_file", [True, False])
def test_your_own_function(mine, as_file):
    module = str(mine) if as_file else "my_losses_for_fxrl"
    assert losses.by_name(f"{module}:direct")("m", 3) == ("m", 3)
    assert losses.by_name(f"{module}:bound", scale=5)("m", 3) == ("m", 15)
    assert losses.by_name(f"{module}:factory")("m", 3) == ("m", 6)
    assert losses.by_name(f"{module}:factory", scale=4)("m", 3) == ("m", 12)
    with pytest.raises(losses.LossConfigError, match="no keyword 'scal'; did you mean 'scale'"):
        losses.by_name(f"{module}:factory", scal=4)
    with pytest.raises(losses.LossConfigError, match=r"needs \(one\); "):
        losses.by_name(f"{module}:odd")
    with pytest.raises(losses.LossConfigError, match="did you mean 'factory'"):
        losses.by_name(f"{module}:factori")


def test_an_import_error_inside_your_module_is_not_hidden(mine):
    (mine.parent / "my_broken_losses.py").write_text("import a_package_that_is_not_there")
    with pytest.raises(losses.LossConfigError, match="a_package_that_is_not_there"):
        losses.by_name("my_broken_losses:direct")
