"""Embeddings and loss head of 8 and 4 bits: exact against their own weight in full."""

import copy
from functools import partial

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fxrl
from fxrl.models import ModelError, Quantization, Quantized, QuantizedLinear, load_model
from fxrl.models.quantized import QuantizedEmbedding, dtype_of, quantize
from fxrl.ops import piecewise_head, sharded
from fxrl.ops.dequantized import FORMATS, quantized, widened
from fxrl.ops.linear_logprob import DIFFERENTIABLE, OUTPUTS, linear_logprob
from tests.capture.mixer import fixed
from tests.models.test_sharded import HEADS, adapted, draw, loss_and_gradients, token_loss

SIZE = "tiny:llama:layers=1,hidden=64,heads=2,kv_heads=1,head_dim=64,intermediate=64,vocab=321"
IDS = torch.arange(3, 15)[None]


@pytest.fixture(autouse=True)
def _pieces(monkeypatch):
    """Of 128 tokens, so that a vocabulary of 321 is three; nothing compiled before is found."""
    monkeypatch.setattr(sharded, "WIDENED", 1)
    torch._dynamo.reset()


def both(format, recipe="row", **options):
    return Quantization(format, recipe, embeddings=True, head=True, **options)


def in_full(model, twin):
    """A model with the same numbers, none of them in few bits."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, Quantized):
                full = widened(module.held, module.format, torch.float64)
                twin.get_submodule(name).weight.copy_(full)
    return twin


@pytest.mark.parametrize(
    ("format", "tie"), [pytest.param("fp8", 0, marks=pytest.mark.slow), ("nf4", 1)]
)
def test_a_step_over_quantised_ends(format, tie):
    """The loss head as it is written, fused, and by tiles; scored with the bits of training."""
    pytest.importorskip("peft")
    held = load_model(f"{SIZE},tie={tie}", "fp64", quantization=both(format))[0]
    twin = in_full(held, load_model(f"{SIZE},tie={tie}", "fp64")[0])
    table, head = held.get_input_embeddings(), held.get_output_embeddings()
    assert (type(table), type(head)) == (QuantizedEmbedding, QuantizedLinear)
    assert (table.weight is head.weight) == (table.weight_scale is head.weight_scale) == bool(tie)
    model, twin = adapted(held), adapted(twin)
    for kind, name in HEADS.items():
        expected = loss_and_gradients(twin, kind)
        config = fxrl.Config(
            passes=(name,), compile_regions=False, min_saved_bytes=0, on_miss="error"
        )
        step = fxrl.optimize(model, token_loss, config)
        for how in (None, step):
            made = loss_and_gradients(model, kind, how)
            for ours, theirs in zip(made, expected, strict=True):
                torch.testing.assert_close(
                    *(torch.tensor(x, dtype=torch.float64) for x in (ours, theirs)),
                    rtol=1e-11,
                    atol=1e-13,
                )
        ops = {str(n.target) for one in step.captures for n in one.rewritten.gm.graph.nodes}
        assert ("fxrl.piecewise_logprob.default" in ops) == (name == "fuse-linear-logprob")


@pytest.mark.parametrize("recipe", ["row", "block", "tensor", "nf4", "int4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_is_widened_in_pieces_is_what_there_is_in_full(recipe, dtype):
    """Rows of an embedding, and the loss head with its gradients; not a piece is of one size."""
    format = recipe if recipe in FORMATS else "fp8"
    values, scale = quantized(draw(321, 192), format, recipe if format == "fp8" else "row")
    weight = widened((values, scale), format, dtype)
    table = QuantizedEmbedding(values, scale, format, dtype)
    ids = torch.randint(0, 321, (3, 5))
    assert table(ids).equal(weight[ids])
    with pytest.raises(IndexError, match="ids are from -1 to 20, and there are 321"):
        table(torch.tensor([-1, 20]))

    hidden = (draw(8, 192, seed=1) / 8).to(dtype).requires_grad_()
    target = torch.randint(0, 321, (8,), generator=torch.Generator().manual_seed(2))
    mask = torch.arange(8) != 3
    heat = (draw(8, seed=3).abs() + 0.5).to(dtype).requires_grad_()
    options = {"temperature": heat, "row_mask": mask, "softcap": 9.0, "scale": 0.7}
    whole = linear_logprob(hidden, weight, target, outputs=OUTPUTS, **options)
    options |= piecewise_head.Held(scale, format, 321, dtype)._asdict()
    score = torch.ops.fxrl.piecewise_logprob
    parts = score(hidden, values, target, outputs=",".join(OUTPUTS), **options)
    with torch.no_grad():
        assert score(hidden, values, target, **options)[0].equal(parts[0]), "as in training"
    exact = {"rtol": 1e-12, "atol": 1e-12}
    for name, a, b in zip(OUTPUTS, parts, whole, strict=True):
        torch.testing.assert_close(a, b, **(exact if dtype == torch.float64 else {}))
        assert a.requires_grad == (name in DIFFERENTIABLE)
        if name in DIFFERENTIABLE:
            grad = draw(8, seed=4).to(a.dtype)
            pairs = (
                torch.autograd.grad(v, (hidden, heat), grad, retain_graph=True) for v in (a, b)
            )
            for ours, theirs in zip(*pairs, strict=True):
                # Sums of terms of both signs: they err by a share of the largest, not of each.
                most = float(theirs.abs().max())
                near = exact if dtype == torch.float64 else {"rtol": 0, "atol": 2**-6 * most}
                torch.testing.assert_close(ours, theirs, **near)


@pytest.mark.parametrize("outputs", ["logprob", "lse", "logprob,lse"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_the_forward_makes_the_gradient_while_it_reads_the_pieces(outputs, softcap, monkeypatch):
    """Once for so many rows, of confident tokens too; the backward reads no head."""
    monkeypatch.setattr(piecewise_head, "ROWS", 5)
    reads, read = [], piecewise_head.Held.read
    monkeypatch.setattr(
        piecewise_head.Held, "read", lambda *given: reads.append(given) or read(*given)
    )
    values, scale = quantized(draw(321, 192), "fp8")
    weight = widened((values, scale), "fp8", torch.float64)
    target, mask = torch.tensor([0, 140, 320, 130, 3, 320, 127, 128]), torch.arange(8) != 3
    hidden = draw(8, 192, seed=1) / 8
    hidden[4:] += 0.2 * weight[target[4:]]
    hidden.requires_grad_()
    heat = (draw(8, seed=3).abs() + 0.5).requires_grad_()
    options = {"temperature": heat, "row_mask": mask, "softcap": softcap, "scale": 0.7}
    names = outputs.split(",")
    whole = linear_logprob(hidden, weight, target, outputs=names, **options)
    options |= piecewise_head.Held(scale, "fp8", 321, torch.float64)._asdict()
    score = partial(torch.ops.fxrl.piecewise_logprob, hidden, values, target, outputs=outputs)
    parts = score(**options)
    assert len(reads) == 2
    with torch.no_grad():
        scored = dict(zip(OUTPUTS, score(**options), strict=True))
    losses, grads = [], [draw(8, seed=4 + n) for n in range(len(names))]
    for made in (parts, whole):
        found = dict(zip(OUTPUTS, made, strict=True))
        losses.append(sum((found[n] * g).sum() for n, g in zip(names, grads, strict=True)))
        assert made is whole or all(found[n].equal(scored[n]) for n in names)
    del reads[:]
    ours, theirs = (torch.autograd.grad(loss, (hidden, heat)) for loss in losses)
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-11, atol=1e-16)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-11, atol=1e-13)
    assert not reads


def test_verify_compares_with_the_weights_as_they_are_held():
    pytest.importorskip("peft")
    model = adapted(load_model(f"{SIZE},tie=1", "bf16", quantization=both("nf4"))[0])
    step = fxrl.optimize(model, token_loss, fxrl.Config(compile_regions=False, min_saved_bytes=0))
    found = step.verify(fixed({"input_ids": IDS.clone()}))
    assert found.ok, str(found)


@pytest.mark.parametrize("tie", [0, 1])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_saved_is_read_again_and_is_there_once(tmp_path, format, tie):
    model, tokenizer = load_model(f"{SIZE},tie={tie}", "bf16", quantization=both(format))
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    held = sum(p.nbytes for p in model.parameters())
    values = [t for n, t in load_file(tmp_path / "model.safetensors").items() if "quant_" not in n]
    assert held <= sum(t.nbytes for t in values) <= held + 200, "shapes of int4 beside"
    again, _ = load_model(tmp_path)
    assert again.dtype == model.dtype == torch.bfloat16
    assert again(IDS).logits.equal(model(IDS).logits)
    assert sum(p.nbytes for p in again.parameters()) == held
    twin = copy.deepcopy(model)
    twin.load_state_dict(again.state_dict())
    assert twin(IDS).logits.equal(model(IDS).logits)
    assert sum(p.nbytes for p in twin.parameters()) == held, "a copy is tied as what it is of"


def test_ends_of_a_checkpoint_whose_linears_are_quantised_already(tmp_path):
    """Its Linears stay with their bytes; what it left is quantised where that is asked for."""
    model, tokenizer = load_model(f"{SIZE},tie=0", "bf16", quantization="fp8")
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    made, _ = load_model(tmp_path, quantization=both("fp8"))
    before, after = model.model.layers[0].mlp.up_proj, made.model.layers[0].mlp.up_proj
    assert before.weight.view(torch.uint8).equal(after.weight.view(torch.uint8))
    values, scale = quantized(model.lm_head.weight.detach(), "fp8")
    assert made.lm_head.weight.view(torch.uint8).equal(values.view(torch.uint8))
    assert made.lm_head.weight_scale.equal(scale)
    assert type(made.get_input_embeddings()) is QuantizedEmbedding


def test_rows_follow_a_cast_of_the_model_and_a_move_leaves_tied_weights_tied():
    model = load_model(f"{SIZE},tie=1", "fp32", quantization=both("nf4"))[0]
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert dtype_of(table) == table(IDS).dtype == torch.float32
    model.to(torch.bfloat16)
    assert dtype_of(table) == table(IDS).dtype == model.dtype == torch.bfloat16
    assert table.weight_scale.dtype == torch.float32
    model._apply(lambda tensor: tensor.clone())  # as to another device
    assert head.weight is table.weight
    assert head.weight_scale is table.weight_scale


def test_what_decodes_is_the_model(tmp_path):
    """Greedily, as its twin in full."""
    model = load_model(f"{SIZE},tie=0", "fp64", quantization=both("fp8"))[0]
    twin = in_full(model, load_model(f"{SIZE},tie=0", "fp64")[0])
    drawn = [m.generate(IDS, max_new_tokens=4, do_sample=False) for m in (model, twin)]
    assert drawn[0].equal(drawn[1])


def one_alone(**options):
    return lambda: quantize(
        load_model(f"{SIZE},tie=1")[0].requires_grad_(False), Quantization("fp8", **options)
    )


def gemma():
    model = load_model("tiny:gemma3:layers=1")[0].requires_grad_(False)
    return quantize(model, Quantization("fp8", embeddings=True, head=True))


REFUSED = {
    "embeddings alone": (one_alone(embeddings=True), "embeddings=true alone: embeddings and head"),
    "head alone": (one_alone(head=True), "head=true alone: .* are one weight; set both"),
    "a class of its own": (
        gemma,
        "has a Gemma3TextScaledWordEmbedding whose weight is not a plain",
    ),
    "no such": (
        lambda: quantize(nn.Linear(64, 64).requires_grad_(False), both("fp8")),
        "embeddings=true: the model has none; leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, why = REFUSED[name]
    with pytest.raises(ModelError, match=why):
        make()
