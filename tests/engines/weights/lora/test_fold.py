"""The fold is the adapter's own function, and afterwards every bit is back, whatever happened."""

import copy

import peft
import pytest
import torch
from torch import nn

from fxrl.engines.weights.lora import fold as folding
from fxrl.engines.weights.lora.fold import (
    BackupError,
    Fold,
    FoldError,
    RestoreError,
    folded,
    require_sound,
)
from fxrl.engines.weights.lora.sites import (
    AdapterError,
    Merge,
    lora_sites,
    lost_share,
    merge_reference,
)
from fxrl.models import Quantization, quantize
from fxrl.ops import host_memory
from fxrl.ops.fp8 import RECIPES, dequantized
from tests.engines.weights.lora.lora_models import (
    assert_same_bits,
    fill,
    gpt2,
    llama,
    snapshot,
    with_lora,
)

IDS = torch.arange(24).view(2, 12)


@torch.no_grad()
def logits(model):
    return model(IDS).logits


@torch.no_grad()
def base_logits(model):
    """What an engine sees that knows the weights and not the adapter."""
    with model.disable_adapter():
        return model(IDS).logits


CASES = {
    "plain": lambda: with_lora(llama()),
    "rslora": lambda: with_lora(llama(), use_rslora=True),
    "patterns": lambda: with_lora(
        llama(), rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 11}
    ),
    "untied head": lambda: with_lora(
        llama(tie_word_embeddings=False), target_modules=["q_proj", "lm_head"]
    ),
    "biases": lambda: with_lora(llama(attention_bias=True)),
    "transposed": lambda: with_lora(gpt2(), fan_in_fan_out=True),
    "float64": lambda: with_lora(llama(torch.float64)).double(),
}


@pytest.fixture
def full_device(monkeypatch):
    monkeypatch.setattr(folding, "free_bytes", lambda device: 2**20)


@pytest.fixture(params=["device", "host"])
def backup(request):
    """The class of the backup that there is room for."""
    if request.param == "device":
        return folding.DeviceBackup
    request.getfixturevalue("full_device")
    return folding.HostBackup


@pytest.mark.parametrize("case", CASES)
def test_folded_weights_are_the_policy_and_come_back(case, backup):
    model = CASES[case]()
    want, base, before = logits(model), base_logits(model), snapshot(model)
    assert not torch.allclose(want, base, atol=1e-3)
    with folded(Fold(model)) as fold:
        assert fold.is_applied
        assert isinstance(fold._backup._on_device or fold._backup._on_host, backup)
        torch.testing.assert_close(base_logits(model), want, rtol=1e-5, atol=2e-6)
    assert not fold.is_applied
    assert fold._backup._on_device is None
    assert_same_bits(model, before)
    assert torch.equal(base_logits(model), base)
    assert set(fold.timings) == {"fold", "restore"}


def test_it_is_what_peft_merges():
    model = with_lora(llama())
    merged = copy.deepcopy(model).merge_and_unload()
    with folded(Fold(model)):
        ours = {s: p for s, p in model.named_parameters() if "base_layer.weight" in s}
        for name, parameter in ours.items():
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            torch.testing.assert_close(parameter, merged.get_parameter(plain))


@pytest.mark.parametrize("fp32_adapter", [True, False])
def test_bf16_weights_round_once_and_by_chance(fp32_adapter):
    model = with_lora(llama(torch.bfloat16), fp32_adapter=fp32_adapter)
    before = snapshot(model)
    fold = Fold(model)
    with folded(fold):
        for site in fold._sites:
            (f,) = site.factors()
            name = f"base_model.model.{site.name}.base_layer.weight"
            want = before[name].double() + f.scaling * f.b.double() @ f.a.double()
            off = site.weight.double() - want
            unit = torch.finfo(torch.bfloat16).eps * want.abs().log2().floor().exp2()
            assert (off.abs() <= unit * 1.01).all()
            assert 0.3 < float((off / unit).std()) < 0.5, "the nearest would be off by 0.29"
    assert_same_bits(model, before)


def in_fp8(recipe="row", change=1.0):
    """Linears in FP8, and an adapter that changes them by so much of their norm."""
    model = with_lora(
        quantize(llama().requires_grad_(False), Quantization("fp8", recipe)),
        target_modules=["q_proj", "down_proj"],
    )
    for site in lora_sites(model):
        weight = dequantized(site.weight, site.scale, torch.float32)
        delta = site.layer.get_delta_weight("default")
        site.layer.lora_B["default"].weight.data.mul_(change * weight.norm() / delta.norm())
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_large_change_of_an_fp8_weight_is_folded(recipe, backup):
    model = in_fp8(recipe, change=0.4)
    policy, before = logits(model), snapshot(model)
    with folded(Fold(model)):
        served = base_logits(model)
    assert_same_bits(model, before)
    near, far = (served - policy).norm(), (base_logits(model) - policy).norm()
    assert float(near) < 0.2 * float(far)


@pytest.mark.parametrize("change", [1e-3, 3e-2])
def test_a_change_that_fp8_would_lose_is_refused(change):
    """It would be served as a part of itself: the rounding error is past a share of its norm."""
    model = in_fp8(change=change)
    before = snapshot(model)
    shares = [lost_share(Merge.of(site)) for site in lora_sites(model)]
    for site, share in zip(lora_sites(model), shares, strict=True):
        kept = Merge.of(site, site.weight.clone())
        (total, delta), _ = kept.total(), merge_reference(kept)
        lost = dequantized(kept.weight, kept.scale, torch.float32) - total
        torch.testing.assert_close(share, float(lost.norm() / delta.norm()))
    assert min(shares) > 0.25
    with pytest.raises(
        FoldError, match=rf"4 of 4 weights are in FP8.*loses {max(shares):.0%} of its change .*25%"
    ):
        Fold(model).apply()
    assert_same_bits(model, before)
    require_sound(model)


def test_several_active_adapters_add_up():
    model = with_lora(llama())
    model.add_adapter("more", peft.LoraConfig(r=2, lora_alpha=5, target_modules=["q_proj"]))
    fill(model)
    model.base_model.set_adapter(["default", "more"])
    want, before = logits(model), snapshot(model)
    with folded(Fold(model)):
        torch.testing.assert_close(base_logits(model), want, rtol=1e-5, atol=2e-6)
    assert_same_bits(model, before)


def test_dropout_plays_no_part():
    model = with_lora(llama(), lora_dropout=0.5)
    want = logits(model.eval())
    with folded(Fold(model.train())):
        torch.testing.assert_close(base_logits(model.eval()), want, rtol=1e-5, atol=2e-6)


@pytest.mark.usefixtures("full_device")
def test_the_factors_are_read_at_each_fold_and_a_host_copy_is_made_once(monkeypatch):
    model = with_lora(llama(torch.bfloat16))
    before = snapshot(model)
    saves = []
    save = folding.HostBackup.save
    monkeypatch.setattr(folding.HostBackup, "save", lambda self: (saves.append(1), save(self)))
    fold = Fold(model)
    seen = []
    for seed in range(3):
        fill(model, seed)
        with folded(fold):
            seen.append(base_logits(model))
        assert base_weights_equal(model, before)
    assert len(saves) == 1
    assert not torch.equal(seen[0], seen[1])
    # Frozen weights that were changed on purpose are copied anew, not rolled back.
    with torch.no_grad():
        fold._sites[0].weight.add_(1)
    changed = snapshot(model)
    with folded(fold):
        pass
    assert len(saves) == 2
    assert_same_bits(model, changed)


def base_weights_equal(model, before):
    return all(torch.equal(p, before[n]) for n, p in model.named_parameters() if "lora_" not in n)


def test_shared_storages_are_written_in_place():
    """An engine that holds views of the same bytes sees the fold and the restore."""
    model = with_lora(llama(), target_modules=["q_proj", "k_proj", "v_proj"])
    attention = model.base_model.model.model.layers[1].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    fused = torch.cat([layer.base_layer.weight for layer in layers]).detach()
    at = 0
    for layer in layers:
        rows = layer.base_layer.out_features
        layer.base_layer.weight = nn.Parameter(fused[at : at + rows], requires_grad=False)
        at += rows
    deltas = torch.cat([layer.get_delta_weight("default") for layer in layers]).detach()
    original = fused.clone()
    with folded(Fold(model)):
        torch.testing.assert_close(fused, original + deltas)
    assert torch.equal(fused, original)


def test_out_of_order_calls_are_refused():
    model = with_lora(llama())
    fold = Fold(model)
    with pytest.raises(FoldError, match=r"apply\(\) comes first"):
        fold.restore()
    fold.apply()
    for again in (fold, Fold(model), Fold(model.base_model)):
        with pytest.raises(FoldError, match="restore"):
            again.apply()
    with pytest.raises(FoldError, match="folded into the weights now"):
        require_sound(model)
    fold.restore()
    require_sound(model)
    with pytest.raises(FoldError, match=r"apply\(\) comes first"):
        fold.restore()


def test_restored_also_when_the_rollout_raises():
    model = with_lora(llama(torch.bfloat16))
    before = snapshot(model)
    seen = []

    def rollout():
        seen.append(base_weights_equal(model, before))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), folded(Fold(model)):
        rollout()
    assert seen == [False]
    assert_same_bits(model, before)


@pytest.mark.parametrize("interrupt", [RuntimeError("device lost"), KeyboardInterrupt()])
def test_restored_when_the_fold_itself_raises_half_way(interrupt, monkeypatch):
    model = with_lora(llama())
    before, real = snapshot(model), folding.merge_all

    def half(merges):
        real(merges[: len(merges) // 2])
        raise interrupt

    monkeypatch.setattr(folding, "merge_all", half)
    fold = Fold(model)
    with pytest.raises(type(interrupt)):
        fold.apply()
    assert not fold.is_applied
    assert_same_bits(model, before)
    require_sound(model)


def test_a_restore_that_missed_a_bit_poisons_the_model(backup, monkeypatch):
    model = with_lora(llama(torch.bfloat16))
    load = backup.load
    fold = Fold(model)
    victim = fold._sites[5]

    def spoiled(self):
        load(self)
        victim.weight.view(torch.int16)[3, 7] ^= 1

    monkeypatch.setattr(backup, "load", spoiled)
    with pytest.raises(RestoreError, match=victim.name.replace(".", r"\.")), folded(fold):
        pass
    for attempt in (lambda: require_sound(model), fold.apply, Fold(model).apply):
        with pytest.raises(RestoreError, match="load the model again"):
            attempt()


def test_an_interrupt_during_the_restore_waits_for_its_end(monkeypatch):
    model = with_lora(llama(torch.bfloat16))
    before, load = snapshot(model), folding.DeviceBackup.load
    calls = []

    def interrupted(self):
        load(self)
        calls.append(1)
        if len(calls) == 1:
            self._originals[3].zero_()
            raise KeyboardInterrupt

    monkeypatch.setattr(folding.DeviceBackup, "load", interrupted)
    with pytest.raises(KeyboardInterrupt), folded(Fold(model)):
        pass
    assert_same_bits(model, before)
    require_sound(model)


def test_the_rollouts_own_error_stays_visible_beside_a_failed_restore(monkeypatch):
    model = with_lora(llama())
    monkeypatch.setattr(folding.DeviceBackup, "load", lambda self: None)
    with pytest.raises(RestoreError) as caught, folded(Fold(model)):
        raise ValueError("generation failed")
    assert isinstance(caught.value.__context__, ValueError)


def test_a_weight_that_moved_while_folded_is_an_error_and_poisons():
    model = with_lora(llama())
    fold = Fold(model)
    fold.apply()
    layer = fold._sites[0].layer.get_base_layer()
    layer.weight.data = layer.weight.data.clone()
    with pytest.raises(RestoreError, match="another storage"):
        fold.restore()


def test_a_weight_that_moved_before_asks_for_a_new_fold():
    model = with_lora(llama())
    fold = Fold(model)
    model.double()
    with pytest.raises(FoldError, match="make a new Fold"):
        fold.apply()
    with folded(Fold(model)):
        pass


def test_adapters_that_changed_ask_for_a_new_fold():
    model = with_lora(llama())
    fold = Fold(model)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.set_adapter("other")
    with pytest.raises(AdapterError, match="make a new Fold"):
        fold.apply()
    model.set_adapter("default")
    with folded(fold):
        assert fold.is_applied
    with model.disable_adapter(), pytest.raises(AdapterError, match="disabled"):
        fold.apply()


def test_full_fine_tuning_has_nothing_to_fold():
    with pytest.raises(AdapterError, match="no active LoRA adapter"):
        Fold(llama())


def test_a_tied_weight_is_not_folded():
    with pytest.raises(AdapterError, match="share memory"):
        Fold(with_lora(llama(tie_word_embeddings=True), target_modules=["lm_head"]))


def test_no_memory_at_all_says_so_and_changes_nothing(monkeypatch):
    model = with_lora(llama())
    before = snapshot(model)

    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(folding, "DeviceBackup", full)
    with folded(Fold(model)) as fold:  # fragmented: the host does
        assert fold._backup._on_host is not None
    monkeypatch.setattr(host_memory, "_POOLS", {})
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(BackupError, match=r"pinned host memory \(full\); give the KV cache less"):
        Fold(model).apply()
    assert_same_bits(model, before)
    require_sound(model)
