"""Regions of any kind: outlined from a graph, whole or in tiles, against eager."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import nn

import fxrl
from fxrl.analysis.outline import outline
from fxrl.compile.outer import aot_graphs
from fxrl.ir.graph_pass import tidy
from fxrl.ir.remark import Refusal
from tests.capture.mixer import assert_matches_eager, grads, outcome
from tests.compile.region_cases import Mlp, ids_batch, saved_bytes, square_loss
from tests.graphs import lowered_graph, nodes_of_module, registered_rewrite

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def optimized(model, loss_fn, name, *, compiled):
    config = fxrl.Config(min_saved_bytes=0, passes=(name,), compile_regions=compiled)
    return fxrl.optimize(model, loss_fn, config)


def outline_modules(*paths):
    """A rewrite that outlines whole modules."""

    def rewrite(gm):
        for path in paths:
            outline(gm, nodes_of_module(gm.graph, path))
            tidy(gm)

    return rewrite


# ---------------------------------------------------------------------------- decoder layer
def tiny_qwen(**options):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, **options,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def masked_logprob(model, batch):
    ids, mask = batch["ids"], batch["mask"]
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logp = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(logp * mask[:, 1:]).sum() / mask.sum()


def qwen_batch(rows, length):
    batch = ids_batch(rows, length, 64)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :2] = 0
    return {**batch, "mask": mask}


@needs_transformers
def test_decoder_layers_are_recomputed_from_their_input():
    model = tiny_qwen()
    with registered_rewrite(outline_modules("layers.0", "layers.1")) as name:
        step = optimized(model, masked_logprob, name, compiled=False)
        for shape in ((2, 7), (3, 9), (4, 16)):
            assert_matches_eager(step, masked_logprob, model, qwen_batch(*shape), tol=1e-6)
    (capture,) = step.captures
    assert len(capture.kernels) == 1, "equal layers share one body"
    batch = qwen_batch(4, 16)
    eager = saved_bytes(lambda: masked_logprob(model, batch))
    assert saved_bytes(lambda: step(batch)) < 0.6 * eager
    saved = aot_graphs(capture.rewritten.gm)["backward"].graph.find_nodes(op="placeholder")
    shapes = [tuple(n.meta["val"].shape) for n in saved if isinstance(n.meta["val"], torch.Tensor)]
    assert [s for s in shapes if len(s) == 3 and s[-1] == 32], "the layers' inputs are saved"
    assert not [s for s in shapes if len(s) == 3 and s[-1] == 48], "nothing inside them is"


# ---------------------------------------------------------------------------- MLP
@pytest.mark.parametrize("compiled", [False, True])
def test_an_mlp_equals_eager(compiled):
    model = Mlp().double()
    with registered_rewrite(outline_modules("mlps.0")) as name:
        step = optimized(model, square_loss, name, compiled=compiled)
        for shape in ((3, 7), (2, 5), (1, 6), (2, 1)):
            assert_matches_eager(step, square_loss, model, ids_batch(*shape), tol=1e-9)


def test_a_body_that_cannot_be_compiled_runs_op_by_op(monkeypatch):
    def broken(*args, **options):
        raise NotImplementedError("no kernels today")

    monkeypatch.setattr("fxrl.compile.bodies.variants.begin_body", broken)
    model = Mlp().double()
    with registered_rewrite(outline_modules("mlps.0")) as name:
        config = fxrl.Config(min_saved_bytes=0, passes=(name,), on_miss="ignore")
        step = fxrl.optimize(model, square_loss, config)
        assert_matches_eager(step, square_loss, model, ids_batch(3, 7), tol=1e-9)
        strict = fxrl.optimize(model, square_loss, replace(config, on_miss="error"))
        with pytest.raises(fxrl.errors.MissedRewriteError, match="no kernels today"):
            strict(ids_batch(3, 7))
    (missed,) = step.report.of_kind("missed")
    assert "op by op" in missed.reason
    assert step.report.of_kind("applied")


def test_equal_layers_share_one_body():
    model = Mlp(layers=3)
    with registered_rewrite(outline_modules("mlps.0", "mlps.1", "mlps.2")) as name:
        step = optimized(model, square_loss, name, compiled=False)
        assert_matches_eager(step, square_loss, model, ids_batch(2, 5), tol=1e-6)
    assert len(step.captures[0].kernels) == 1


def test_frozen_weights_get_no_gradient():
    model = Mlp()
    model.mlps[0].up.weight.requires_grad_(False)
    with registered_rewrite(outline_modules("mlps.0")) as name:
        step = optimized(model, square_loss, name, compiled=False)
        assert_matches_eager(step, square_loss, model, ids_batch(2, 5), tol=1e-6)
    assert model.mlps[0].up.weight.grad is None


# ---------------------------------------------------------------------------- autograd around it
@pytest.fixture(params=[False, True], ids=["op by op", "compiled"])
def mlp_step(request):
    model = Mlp()
    with registered_rewrite(outline_modules("mlps.0")) as name:
        yield model, optimized(model, square_loss, name, compiled=request.param)


def test_scaled_losses_sums_and_accumulation(mlp_step):
    model, step = mlp_step
    first, second = ids_batch(2, 5), ids_batch(3, 6, seed=1)

    def both(function):
        model.zero_grad(set_to_none=True)
        (0.5 * function(first) + 3 * function(second)).backward()
        function(first).backward()  # on top of what is there
        return grads(model)

    found, expected = both(step), both(lambda b: square_loss(model, b))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def test_without_grad_the_same_loss(mlp_step):
    model, step = mlp_step
    batch = ids_batch(2, 5)
    with torch.no_grad():
        loss = step(batch)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, square_loss(model, batch))


def test_an_output_read_twice_and_expanded_gradients():
    model = Mlp()

    def loss_fn(model, batch):
        x = model.embed(batch["ids"])
        y = model.mlps[0](x)
        return (y.sum(-1) * 2).mean() + (y.transpose(0, 1) * x.transpose(0, 1)).sum() + y.sum()

    with registered_rewrite(outline_modules("mlps.0")) as name:
        step = optimized(model, loss_fn, name, compiled=False)
        assert_matches_eager(step, loss_fn, model, ids_batch(3, 5), tol=1e-5)


def test_fp16_with_a_huge_loss_scale():
    model = Mlp(hidden=8, inner=16).half()

    def loss_fn(model, batch):
        return model(batch["ids"]).float().square().mean()

    with registered_rewrite(outline_modules("mlps.0")) as name:
        step = optimized(model, loss_fn, name, compiled=False)
        batch = ids_batch(2, 6)
        _, found = outcome(lambda b: step(b) * 2.0**12, model, batch)
        _, expected = outcome(lambda b: loss_fn(model, b) * 2.0**12, model, batch)
        for key, value in expected.items():
            scale = value.abs().max().item()
            torch.testing.assert_close(found[key], value, rtol=2e-2, atol=2e-3 * scale)
        _, overflown = outcome(lambda b: step(b) * 2.0**40, model, batch)
        assert not all(g.isfinite().all() for g in overflown.values()), "GradScaler must see it"


def test_autocast_around_a_step_is_applied_once():
    model = Mlp()

    def loss_fn(model, batch):
        return model(batch["ids"]).float().square().mean()

    with registered_rewrite(outline_modules("mlps.0")) as name:
        step = optimized(model, loss_fn, name, compiled=False)
        with torch.autocast("cpu", torch.bfloat16):
            assert_matches_eager(step, loss_fn, model, ids_batch(2, 5), tol=2e-2)


# ---------------------------------------------------------------------------- refusals
def test_what_cannot_be_outlined_is_refused():
    class Dropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))])

        def forward(self, x):
            return self.mlps[0](x)

    graph = lowered_graph(Dropout(), lambda m, b: m(b["x"]).sum(), {"x": torch.randn(2, 3)})
    before = str(graph.graph)
    with pytest.raises(Refusal, match="random numbers"):
        outline(graph, nodes_of_module(graph.graph, "mlps.0"))
    with pytest.raises(Refusal, match="none of the nodes"):
        outline(graph, [])
    assert str(graph.graph) == before


def test_sums_over_groups_of_the_vocabulary_are_compiled():
    """Inductor would let ``index_add`` write into expanded zeros, of one place for all groups."""

    def loss(model, batch):
        p = model(batch["ids"]).softmax(-1)
        groups = torch.arange(50) % 8
        return -p.new_zeros(*p.shape[:2], 8).index_add(-1, groups, p).log().mean()

    model = torch.nn.Sequential(torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)).double()
    step = optimized(model, loss, "chunk-vocab-region", compiled=True)
    assert_matches_eager(step, loss, model, ids_batch(3, 7), tol=1e-9)
    assert step.report.of_kind("applied")
