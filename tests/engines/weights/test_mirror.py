"""A trainer in another dtype than its engine: fp32 master weights are rounded into vLLM's."""

import pytest
import torch

from fxrl.engines.weights.lora.sites import lora_sites
from fxrl.engines.weights.share.binder import share
from fxrl.engines.weights.sync import RouteError, WeightSync
from fxrl.models import lora
from tests.engines.weights.share.fake_vllm import checkpoint, fake_vllm
from tests.engines.weights.test_sync import Engine, move_adapter


def made(tmp_path, **fake_options):
    fake = fake_vllm(checkpoint(tmp_path, "qwen3"), **fake_options)
    model, report = share(fake, tmp_path, device="cpu", dtype=torch.float32)
    engine = Engine("none built")
    sync = WeightSync(engine, {})
    sync.share(model, copied=report.copied, mirrors=report.mirrors)
    return fake, model, report, sync, engine


def parts(fake, layer=0):
    """q, k and v of vLLM's fused weight."""
    return fake.get_submodule(f"model.layers.{layer}.self_attn.qkv_proj").weight


def qkv(model, layer=0):
    attention = model.model.layers[layer].self_attn
    return [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]


def test_every_parameter_has_a_mirror(tmp_path):
    _, model, report, sync, _ = made(tmp_path)
    assert report.shared_bytes == 0
    assert set(report.mirrors) == {n for n, _ in model.named_parameters(remove_duplicate=False)}
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert sync.way == "mirror"


def test_an_optimizer_step_reaches_the_engine_at_the_update(tmp_path):
    fake, model, _, sync, engine = made(tmp_path)
    sync.attach(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    before = parts(fake).clone()
    sync.update(lora=False)
    wanted = torch.cat([p.detach() for p in qkv(model)]).bfloat16()  # as autocast rounds them
    assert torch.equal(parts(fake), wanted)
    assert not torch.equal(before, wanted)
    rows = len(model.model.embed_tokens.weight)
    assert torch.equal(
        fake.get_submodule("model.embed_tokens").weight[:rows],
        model.model.embed_tokens.weight.detach().bfloat16(),
    )
    assert not engine.weights


def test_an_adapter_is_added_to_what_autocast_multiplies_by_and_rounded_by_chance(tmp_path):
    torch.manual_seed(0)
    fake, base, _, sync, engine = made(tmp_path)
    with torch.no_grad():
        for weight in qkv(base):  # as of a checkpoint of fp32 weights
            weight.add_(torch.randn_like(weight) * 1e-3)
    own = [p.detach().clone() for p in qkv(base)]
    nearest = torch.cat(own).bfloat16()
    assert not torch.equal(nearest.float(), torch.cat(own))
    model = lora(base, r=4, alpha=6, seed=0).eval()
    sync.attach(model)
    assert sync.way == "mirror"
    with sync.rollout():
        pass
    assert torch.equal(parts(fake), nearest)  # B is zero yet
    move_adapter(model, 1e-3)
    sync.update(lora=True)
    sites = {site.name: site for site in lora_sites(model)}
    shards = [sites[f"model.layers.0.self_attn.{name}_proj"] for name in "qkv"]
    pairs = [shard.factors()[0] for shard in shards]
    added = torch.cat([f.scaling * f.b.double() @ f.a.double() for f in pairs])
    found = parts(fake).double() - nearest.double()
    largest = torch.maximum(nearest.double().abs(), (nearest + added).abs())
    unit = torch.finfo(torch.bfloat16).eps * largest.log2().floor().exp2()
    assert ((found - added).abs() <= 2.01 * unit).all()  # twice as far above a power of two
    share = float((found * added).sum() / added.square().sum())
    assert abs(share - 1) < 4 * float((found - added).std() / added.norm()) < 0.4
    assert all(torch.equal(w, s.weight) for w, s in zip(own, shards, strict=True))  # unchanged
    assert not engine.weights


def test_what_an_adapter_trains_beside_its_factors_is_refused_at_once(tmp_path):
    from peft import LoraConfig, get_peft_model

    _, base, _, sync, _ = made(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    with pytest.raises(RouteError, match=r"lm_head: .*trains the module itself"):
        sync.attach(get_peft_model(base, config))


def shuffled(tensors):
    """Rows of the parts in turns, which no placement describes."""
    rows = torch.cat(tensors)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def test_what_is_neither_shared_nor_mirrored_makes_all_be_copied(tmp_path):
    _, model, report, sync, engine = made(tmp_path, fuse=shuffled)
    apart = set(report.copied) - set(report.mirrors)
    assert any("q_proj" in name for name in apart)
    sync.attach(model)
    assert sync.way == "copy"
    assert sorted(apart)[0] in sync.reason
    sync.update(lora=False)
    assert engine.weights[-1].keys() == dict(model.named_parameters()).keys()


def test_an_adapter_on_weights_that_are_not_shared_is_not_folded(tmp_path):
    """Folding would change the trainer's copy, which the engine never reads."""
    fake = fake_vllm(checkpoint(tmp_path, "qwen3"), fuse=shuffled)
    base, report = share(fake, tmp_path, device="cpu")
    assert 0 < report.copied_bytes < report.shared_bytes + report.copied_bytes
    sync = WeightSync(Engine("none built"), {})
    sync.share(base, copied=report.copied, mirrors=report.mirrors)
    with pytest.raises(Exception, match="adapted weights are not shared"):
        sync.attach(lora(base, r=4, alpha=6, seed=0))
