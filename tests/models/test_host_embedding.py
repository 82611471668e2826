"""Frozen embeddings in host memory: eager's numbers, no GPU memory, and who is refused."""

import copy
import io

import pytest
import torch
from torch import nn

import fxrl
from fxrl.models import HostEmbedding, ModelError, load_model, offload_embeddings
from fxrl.ops.host_rows import host_rows, is_on_host
from tests.models.test_sharded import adapted, loss_and_gradients, same, token_loss

SIZE = "layers=1,hidden=64,heads=2,kv_heads=1,head_dim=64,intermediate=64,vocab=321,tie=0"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def model_of(kind):
    pytest.importorskip("peft")
    return adapted(load_model(f"tiny:{kind}:{SIZE}", "fp64")[0])


@pytest.mark.parametrize(
    "kind", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"]
)  # which scales what it has looked up
def test_a_step_has_the_numbers_of_a_table_on_the_gpu(kind):
    twin, model = model_of(kind), offload_embeddings(model_of(kind))
    table = model.get_input_embeddings()
    assert isinstance(table, HostEmbedding)
    assert isinstance(table, type(twin.get_input_embeddings()))
    assert model.state_dict().keys() == twin.state_dict().keys()
    config = fxrl.Config(compile_regions=False, min_saved_bytes=0, on_miss="error")
    step = fxrl.optimize(model, token_loss, config)
    for batch in ("padded", "packed"):
        expected = loss_and_gradients(twin, batch)
        assert loss_and_gradients(model, batch) == expected
        same(loss_and_gradients(model, batch, step), expected)
    looked_up = [n for n in step.captures[0].rewritten.gm.graph.nodes if "host_rows" in str(n)]
    assert len(looked_up) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model.requires_grad_(True), "only embeddings that are trained"),
        (lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight), "no emb"),
        (lambda model: setattr(model.model.embed_tokens, "max_norm", 1.0), "no embedding"),
    ],
    ids=["trained", "tied", "written to"],
)
def test_who_is_refused(change, words):
    model = load_model(f"tiny:llama:{SIZE}")[0].requires_grad_(False)
    change(model)
    with pytest.raises(ModelError, match=words):
        offload_embeddings(model)
    assert type(model.model.embed_tokens) is nn.Embedding


def test_it_is_not_trained():
    table = offload_embeddings(nn.Sequential(nn.Embedding(5, 3).requires_grad_(False)))[0]
    with pytest.raises(ModelError, match="put an adapter beside it"):
        table.requires_grad_()
    assert not table.requires_grad_(False).weight.requires_grad
    with pytest.raises(IndexError):
        table(torch.tensor([5]))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_whatever_moves_it_leaves_it_there(device):
    module = nn.Embedding(321, 64, dtype=torch.bfloat16).requires_grad_(False)
    numbers, ids = module.weight.detach().clone(), torch.randint(0, 321, (2, 7), device=device)
    model = offload_embeddings(nn.Sequential(module)).to(device)
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    for made in (
        model,
        copy.deepcopy(model),
        torch.load(stored, weights_only=False),
        model.cpu().to(device),
        model.double().bfloat16(),
    ):
        weight = made[0].weight
        assert isinstance(weight, nn.Parameter)
        assert weight.device.type == device
        assert is_on_host(weight) == (device == "cuda")
        assert made(ids).equal(numbers.to(device)[ids])
        torch.library.opcheck(host_rows, (ids, weight))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_takes_no_gpu_memory_and_the_plan_knows_it():
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8}
    config = LlamaConfig(num_hidden_layers=2, vocab_size=64_000, **size)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).bfloat16()
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    table = model.get_input_embeddings().weight
    batch = {"input_ids": torch.randint(0, 64_000, (1, 4096), device="cuda")}
    found = []
    for change in (nn.Module.train, nn.Module.train, offload_embeddings):  # once for workspaces
        step = fxrl.optimize(change(model), token_loss, fxrl.Config(on_miss="error"))
        step(batch).backward()
        model.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        loss = step(batch)
        loss.backward()
        peak, planned = torch.cuda.max_memory_allocated(), step.plan.peak_gpu_bytes
        found.append((peak, planned, loss.item(), [p.grad for p in lora_of(model)]))
        model.zero_grad()
    _, (peak, planned, loss, grads), (less, planned_less, again, same_grads) = found
    assert peak - less == pytest.approx(table.nbytes, rel=0.02)
    assert planned - planned_less == table.nbytes
    assert loss == again
    for expected, grad in zip(grads, same_grads, strict=True):  # attention sums in any order
        assert (grad - expected).norm() <= 1e-2 * expected.norm()


def lora_of(model):
    return [p for p in model.parameters() if p.requires_grad]
