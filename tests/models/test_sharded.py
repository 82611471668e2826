"""Weights that the ranks of a host share out: one process's numbers, a part of its memory."""

import copy
import json
import os
import pickle
import signal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing import get_context

import fxrl
from fxrl.engines.kv_cache import held_bytes
from fxrl.engines.weights.lora.sites import AdapterError, lora_sites, why_not_mergeable
from fxrl.errors import ConfigError, FxrlError
from fxrl.ir.plan import CutLayer, Plan
from fxrl.models import (
    ModelError,
    Quantization,
    Quantized,
    Sharded,
    ShardedLinear,
    load_model,
    lora,
    shard,
)
from fxrl.models.checkpoint import owner_of
from fxrl.models.load import write_model
from fxrl.models.sharded import ShardedEmbedding
from fxrl.ops import sharded as sharded_ops
from fxrl.ops.linear_logprob import DIFFERENTIABLE, OUTPUTS, linear_logprob
from fxrl.ops.piecewise_head import PART, Held
from fxrl.ops.sharded import Layout, Peers, Shards, new_part
from fxrl.rl.loop.fingerprint import of_weights
from tests.capture.mixer import fixed
from tests.compile.shared_sequences import in_ranks
from tests.forked import need_autograd_in_forks
from tests.passes.layered import GatedBlock, ids_batch, make_stack, square_loss


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)


def frozen(layers=2):
    """Layers with adapters."""
    model = make_stack(layers, block=GatedBlock, width=64, wide=128)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in (".a.", ".b.", "embed", "head")))
    return model


def three_steps(model, optimized=True):
    """Losses, and what is trained after three steps of Adam."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-3)
    plan = Plan({f"0:blocks.{i}": CutLayer("inputs") for i in range(2)})
    config = fxrl.Config(
        passes=("outline-layers", "recompute"), compile_regions=False, on_miss="error"
    )
    step = fxrl.optimize(model, square_loss, config, plan=plan)
    losses = []
    for seed in range(3):
        batch = fixed({"ids": ids_batch(seed=seed)["ids"].to(trained[0].device)})
        optimizer.zero_grad()
        loss = step(batch) if optimized else square_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    if optimized:
        (capture,) = step.captures
        assert capture.running
        outside = {str(node.target) for node in capture.rewritten.gm.graph.nodes}
        assert "fxrl.region.default" in outside
        assert "fxrl.sharded_mm.default" not in outside
    return losses, [p.grad.tolist() for p in trained], [p.tolist() for p in trained]


def sharded_linears(model):
    return [m for m in model.modules() if isinstance(m, ShardedLinear)]


def language_model():
    """With adapters beside its layers; its head is the table of its embeddings."""
    size = "tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1,intermediate=48,vocab=321,tie=1"
    return adapted(load_model(size, "fp64")[0])


def adapted(model):
    model = lora(model, r=2, seed=0)
    factors = [p for name, p in model.named_parameters() if "lora_B" in name]
    for seed, factor in enumerate(factors):
        factor.data = draw(*factor.shape, seed=seed).to(factor.dtype) / 10
    return model


def token_batches():
    """Rows with padding, whose sizes are fixed, and a row of three documents of any length."""
    ids = torch.randint(0, 321, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[0, 8:] = 0
    positions = torch.cat([torch.arange(n) for n in (5, 4, 3)])[None]
    return {
        "padded": fixed({"input_ids": ids.clone(), "attention_mask": mask}),
        "packed": {"input_ids": ids[:1], "position_ids": positions},
    }


def token_loss(model, batch):
    """Log-probabilities and entropies of the next tokens."""
    logps = torch.log_softmax(model(**batch, use_cache=False).logits[:, :-1], -1)
    chosen = logps.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    entropy = -(logps.exp() * logps).sum(-1)
    keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:]
    return ((chosen.exp() - 0.1 * entropy) * keep).sum() / keep.sum()


HEADS = {"padded": "fuse-linear-logprob", "packed": "chunk-vocab-region"}


def loss_and_gradients(model, kind, step=None):
    batch = token_batches()[kind]
    loss = token_loss(model, batch) if step is None else step(batch)
    loss.backward()
    grads = [p.grad.flatten().tolist() for p in model.parameters() if p.requires_grad]
    model.zero_grad()
    return [[loss.item()], *grads]


def every_head(model, kinds=tuple(HEADS)):
    """Losses and gradients of each batch, eager and with a rewritten head, and its graph's ops."""
    made, ops = {}, []
    for kind in kinds:
        config = fxrl.Config(
            passes=(HEADS[kind],), compile_regions=False, min_saved_bytes=0, on_miss="ignore"
        )
        step = fxrl.optimize(model, token_loss, config)
        made[kind] = [loss_and_gradients(model, kind, how) for how in (None, step)]
        (capture,) = step.captures
        ops += [str(node.target) for node in capture.rewritten.gm.graph.nodes]
    return made, sorted({*ops})


def same(made, expected):
    for ours, theirs in zip(made, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------- ranks
@pytest.mark.parametrize("optimized", [True, False])
def test_two_ranks_have_the_numbers_of_one_process_and_half_of_the_weights(optimized):
    whole = sum(m.weight.nbytes for m in frozen().modules() if is_shared_out(m))

    def work():
        model = shard(frozen())
        linears = sharded_linears(model)
        parameters = {id(p) for p in model.parameters()}
        assert not [m for m in linears if id(m.part) in parameters]
        held = sum(m.part.nbytes for m in linears), linears[0].shards.parts[0].nbytes
        return [held, three_steps(model, optimized), linears[0].shards.fetched]

    expected = three_steps(frozen(), optimized=False)
    for held, made, fetched in in_ranks(2, work):
        same(made, expected)
        assert held == [whole // 2, whole // 2], "each weight's part fills its place here"
        assert fetched >= 3 * 2 * 7 * 2, "in three steps, both ways, of seven weights a layer"


def is_shared_out(module):
    return type(module) is nn.Linear and not module.weight.requires_grad


def test_embeddings_and_head_are_shared_out_whichever_way_the_head_goes(monkeypatch):
    """Of 321 tokens, which two ranks do not have in equal parts; in four pieces."""
    pytest.importorskip("peft")
    monkeypatch.setattr(sharded_ops, "PIECE", 100 * 32 * 8)

    def work():
        model = shard(language_model())
        whole = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
        made, ops = every_head(model)
        return [whole, held_bytes(model), made, ops]

    model = language_model()
    expected = {kind: loss_and_gradients(model, kind) for kind in HEADS}
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    norms = sum(p.nbytes for n, p in model.named_parameters() if "norm" in n)
    for whole, held, made, ops in in_ranks(2, work):
        assert whole == norms, "nothing else is whole"
        rest = sum(p.nbytes for p in model.parameters()) - table.nbytes - norms
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        parts = (rest - trained) // 2 + 161 * 32 * 8
        assert held == norms + trained + parts + 2 * 81 * 32 * 8
        for name, values in expected.items():
            for one in made[name]:
                same(one, values)
        assert {"fxrl.piecewise_logprob.default", "fxrl.region.default"} <= {*ops}


def in_few_bits(how, tie):
    size = "tiny:llama:layers=1,hidden=64,heads=2,kv_heads=1,head_dim=64,intermediate=128,vocab=321"
    return load_model(f"{size},tie={tie}", "fp64", quantization=how)


def test_weights_in_8_bits_are_shared_out(monkeypatch):
    """Scales by blocks of rows; the vocabulary is three pieces."""
    pytest.importorskip("peft")
    monkeypatch.setattr(sharded_ops, "WIDENED", 1)
    whole, _ = in_few_bits(Quantization("fp8", "block", embeddings=True, head=True), 1)

    def work():
        model = shard(copy.deepcopy(whole))
        parts = {id(m.part): m.part.nbytes for m in model.modules() if isinstance(m, Sharded)}
        return [sum(parts.values()), *every_head(adapted(model), ["padded"])]

    values = {m.weight for m in whole.modules() if isinstance(m, Quantized)}
    model = adapted(copy.deepcopy(whole))
    expected = loss_and_gradients(model, "padded")
    for held, made, ops in in_ranks(2, work):
        assert held == (sum(p.nbytes for p in values) + 64) // 2, "and a row for the odd one"
        assert "fxrl.piecewise_logprob.default" in ops
        for found in made["padded"]:
            same(found, expected)


def test_a_checkpoint_in_4_bits_is_read_in_parts(tmp_path):
    """Quantised before, or while it is read."""
    pytest.importorskip("peft")
    how = Quantization("nf4", skip=("o_proj",), head=True)
    for folder, asked in (("few", how), ("plain", None)):
        for written in in_few_bits(asked, 0):
            written.save_pretrained(tmp_path / folder)

    def work():
        made = []
        for folder, asked in (("few", None), ("plain", how)):
            given = {"quantization": asked, "peers": Peers.of()}
            model = adapted(load_model(tmp_path / folder, "fp64", **given)[0])
            made.append([of_weights(model), loss_and_gradients(model, "padded")])
        return made

    model = adapted(in_few_bits(how, 0)[0])
    told, expected = of_weights(model), loss_and_gradients(model, "padded")
    for rank in in_ranks(2, work):
        for ours, made in rank:
            assert ours == told
            same(made, expected)


@pytest.mark.parametrize("kind", ["llama:layers=1,vocab=321,tie=1", "gemma3:layers=1", "gpt2"])
def test_a_checkpoint_of_tied_weights_is_read_in_parts(kind, tmp_path):
    """Gemma's table is of a class of its own, so it and the head that it is stay whole."""
    model, tokenizer = load_model(f"tiny:{kind}", "fp64")
    write_model(model, tokenizer, tmp_path)
    ids = torch.arange(9)[None]

    def work():
        made, _ = load_model(str(tmp_path), "fp64", peers=Peers.of())
        table, head = made.get_input_embeddings(), made.get_output_embeddings()
        parts = [getattr(module, "part", None) for module in (table, head)]
        drawn = made.generate(ids, max_new_tokens=3, do_sample=False).tolist()
        return [parts[0] is parts[1], parts[0] is None, made(ids).logits.tolist(), drawn]

    expected = model(ids).logits.tolist()
    drawn = model.generate(ids, max_new_tokens=3, do_sample=False).tolist()
    for tied, whole, logits, ours in in_ranks(2, work):
        assert tied
        assert whole == kind.startswith("gemma3")
        same(logits, expected)
        assert ours == drawn


def test_a_rank_that_is_killed_holds_up_nobody(tmp_path):
    """It is gone before the first step of the other, which reads its part."""
    need_autograd_in_forks()
    gone, alive = os.pipe()

    def work(rank):
        torch.set_num_threads(1)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
        model = shard(frozen(2))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(alive)
        assert not os.read(gone, 1), "the end of it: nobody else holds the other end"
        (tmp_path / "made").write_text(json.dumps(three_steps(model, optimized=False)))
        os._exit(0)

    ranks = [get_context("fork").Process(target=work, args=(rank,)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    os.close(alive)
    for rank in ranks:
        rank.join(60)
    os.close(gone)
    assert [rank.exitcode for rank in ranks] == [0, -signal.SIGKILL]
    made = json.loads((tmp_path / "made").read_text())
    same(made, three_steps(frozen(2), optimized=False))


def test_what_is_sent_names_memory_and_hands_over_no_open_file():
    """Which only processes of one parent could."""
    sent = []
    part = new_part(1000, torch.device("cpu")).fill_(7)
    made = Peers(0, (0,), lambda value: sent.append(value) or [value]).map(part)
    assert made[0] is part
    assert b"rebuild_storage_filename" in sent[0][0]
    assert pickle.loads(sent[0][0]).data_ptr() == part.data_ptr()


# ---------------------------------------------------------------------------- one process
def in_parts(*weights, prefetch=None, device="cpu"):
    """Weights as rank 1 of 2 has them, whose other part is memory of this process."""
    halves = [
        torch.cat([w, w[: len(w) % 2]]).to(device).view(torch.uint8).view(2, -1) for w in weights
    ]
    memory = [torch.cat([half[rank] for half in halves]) for rank in range(2)]
    largest = max(Layout(len(w), w.dtype, "").piece_bytes(w.shape[1] * w.itemsize) for w in weights)
    shards = Shards(memory, 1, largest, prefetch=prefetch)
    sizes = [half.shape[1] for half in halves]
    parts = [
        part.view(-1, w.shape[1] * w.itemsize)
        for part, w in zip(memory[1].split(sizes), weights, strict=True)
    ]
    return shards, parts


def in_place(model, linears):
    shards, parts = in_parts(*(linear.weight.detach() for linear in linears.values()))
    for (path, linear), part in zip(linears.items(), parts, strict=True):
        weight = linear.weight
        layout = Layout(len(weight), weight.dtype, "")
        made = ShardedLinear(part, layout, linear.bias, shards)
        setattr(*owner_of(model, path), made)


def as_part(vocab, dtype):
    """What the loss head is told of a weight of which this rank has a part."""
    return Held(None, PART, vocab, dtype)._asdict()


def product(rows, part, weight, transpose=False):
    size = len(weight)
    return torch.ops.fxrl.sharded_mm.default(rows, [part], size, weight.dtype, "", transpose)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_product_is_that_of_the_weight_in_full(transpose, dtype):
    weight = draw(11, 6, dtype=dtype)
    _shards, (part,) = in_parts(weight)
    rows = draw(3, 11 if transpose else 6, seed=1, dtype=dtype).requires_grad_()
    made = product(rows, part, weight, transpose)
    expected = rows @ (weight if transpose else weight.t())
    assert made.equal(expected)
    grad = draw(*made.shape, seed=2, dtype=dtype)
    ours, theirs = (torch.autograd.grad(y, rows, grad)[0] for y in (made, expected))
    assert ours.equal(theirs)
    checked = (rows, [part], 11, dtype, "", transpose)
    torch.library.opcheck(
        torch.ops.fxrl.sharded_mm.default, checked, test_utils="test_autograd_registration"
    )
    with FakeTensorMode() as mode:
        rows, part = map(mode.from_tensor, (rows, part))
        assert product(rows, part, weight, transpose).shape == made.shape


@pytest.mark.parametrize("piece", [1000, 250, 50], ids=["whole", "pieces", "a row"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_comes_in_pieces_is_what_there_is_in_full(monkeypatch, piece, dtype):
    """Products both ways, rows of an embedding, and the loss head with its gradients."""
    monkeypatch.setattr(sharded_ops, "PIECE", piece * dtype.itemsize // 8)
    weight = draw(21, 6, dtype=dtype)
    shards, (part,) = in_parts(weight)
    hidden = draw(8, 6, seed=1, dtype=dtype).requires_grad_()
    near = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.1}
    made, expected = product(hidden, part, weight), hidden @ weight.t()
    assert made.equal(expected) or dtype == torch.float64
    torch.testing.assert_close(made, expected, **near)
    grad = draw(8, 21, seed=2, dtype=dtype)
    ours, theirs = (torch.autograd.grad(y, hidden, grad)[0] for y in (made, expected))
    torch.testing.assert_close(ours, theirs, **near)

    table = ShardedEmbedding(part, Layout(21, dtype, ""), shards)
    ids = torch.randint(0, 21, (3, 5))
    assert table(ids).equal(weight[ids])
    with pytest.raises(IndexError, match="ids are from -1 to 20, and there are 21"):
        table(torch.tensor([-1, 20]))

    target, mask = torch.randint(0, 21, (8,)), torch.arange(8) != 3
    heat = (draw(8, seed=3).abs() + 0.5).to(hidden.dtype).requires_grad_()
    options = {"temperature": heat, "row_mask": mask, "softcap": 9.0, "scale": 0.7}
    whole = linear_logprob(hidden, weight, target, outputs=OUTPUTS, **options)
    options |= {**as_part(21, dtype), "outputs": ",".join(OUTPUTS)}
    parts = torch.ops.fxrl.piecewise_logprob(hidden, part, target, **options)
    near = near if dtype == torch.float64 else {"rtol": 0.02, "atol": 0.01}
    for name, a, b in zip(OUTPUTS, parts, whole, strict=True):
        values = {"rtol": 1e-12, "atol": 1e-12} if dtype == torch.float64 else {}
        torch.testing.assert_close(a, b, **values)
        assert a.requires_grad == (name in DIFFERENTIABLE)
        if name in DIFFERENTIABLE:
            grad = draw(8, seed=4).to(a.dtype)
            pairs = (
                torch.autograd.grad(v, (hidden, heat), grad, retain_graph=True) for v in (a, b)
            )
            for ours, theirs in zip(*pairs, strict=True):
                torch.testing.assert_close(ours, theirs, **near)


def test_a_confident_token_keeps_its_gradient_in_another_piece(monkeypatch):
    """Whose probability is 1 in every float, and whose log-probability is not 0."""
    monkeypatch.setattr(sharded_ops, "PIECE", 2 * 4 * 4)
    weight = torch.eye(8, 4) * 20
    _shards, (part,) = in_parts(weight)
    hidden = torch.eye(4)[:1].requires_grad_()
    given = as_part(8, torch.float32)
    made = torch.ops.fxrl.piecewise_logprob(hidden, part, torch.tensor([0]), **given)[0]
    exact = torch.log_softmax(hidden.double() @ weight.double().t(), -1)[:, 0]
    for ours, theirs in ((made, exact), (torch.autograd.grad(y, hidden)[0] for y in (made, exact))):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=0)


def test_rows_of_a_wider_dtype_widen_the_weight():
    weight = draw(10, 6, dtype=torch.bfloat16)
    _shards, (part,) = in_parts(weight)
    rows = draw(3, 6)
    assert product(rows, part, weight).equal(rows @ weight.double().t())


def test_what_comes_next_is_learned_and_a_wrong_guess_is_no_wrong_number():
    weights = [draw(4, 4, seed=i) for i in range(5)]
    shards, parts = in_parts(*weights, prefetch=True)
    rows = draw(2, 4, seed=9)

    def read(*order):
        before = shards.expected
        for i in order:
            assert product(rows, parts[i], weights[i]).equal(rows @ weights[i].t())
        return shards.expected - before

    step = [0, 1, 2, 3, 4, 4, 3, 2, 1, 0]  # a forward and a backward
    read(*step, *step)
    assert read(*step) == len(step), "all had begun"
    assert read(3, 1, 4, 0, 2) < 5
    read(*step, *step)
    assert read(*step) == len(step)


def test_the_weight_that_others_see_has_no_numbers():
    weight = draw(10, 6)
    shards, (part,) = in_parts(weight)
    linear = ShardedLinear(part, Layout(10, weight.dtype, ""), None, shards)
    assert (linear.weight.shape, linear.weight.dtype) == (weight.shape, weight.dtype)
    assert linear.weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"):
        linear.weight.data += 1.0
    assert linear.whole().equal(weight)
    twin = copy.deepcopy(linear)
    assert twin.part is linear.part
    assert twin(draw(3, 6)).equal(linear(draw(3, 6)))
    linear.to(torch.bfloat16)
    assert linear.whole().equal(weight)
    linear.requires_grad_(False)
    with pytest.raises(ModelError, match="is to be trained, and its weight is shared out"):
        linear.requires_grad_()


# ---------------------------------------------------------------------------- refusals
def told(*others):
    """What gathers this rank's values and these."""
    return lambda value: [value, *(other(value) for other in others)]


def neighbour(value):
    return (value[0], "other") if isinstance(value, tuple) else value


def used_twice():
    """By what nobody else knows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model.own = model[0].weight
    return model.requires_grad_(False)


REFUSED = {
    "trained": (lambda: nn.Sequential(nn.Linear(4, 4)), "as they are trained, and only frozen"),
    "used twice": (used_twice, "no nn.Linear and no nn.Embedding whose weight nothing else has"),
    "meta": (lambda: frozen(1).to("meta"), "a rank's weights are on one device, and these on meta"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    make, why = REFUSED[name]
    model = make()
    before = [*map(type, model.modules())]
    with pytest.raises(ModelError, match=why):
        shard(model, Peers.of(told(neighbour)))
    assert [*map(type, model.modules())] == before


def test_no_ranks():
    with pytest.raises(ConfigError, match="this process is none: start several by torchrun"):
        shard(frozen(1))
    with pytest.raises(ConfigError, match="has one of 2; start several there"):
        Peers.of(told(lambda value: ("elsewhere", "other")))


def test_other_models_do_not_go_together():
    peers = Peers.of(told(neighbour))
    other = Peers(peers.rank, peers.members, told(lambda value: value[:-1]))
    with pytest.raises(FxrlError, match=r"the weights of ranks \[1\] are others than this rank's"):
        shard(frozen(1), other)


def test_a_part_that_is_moved_or_copied_is_found_out():
    weight = draw(10, 6)
    shards, (part,) = in_parts(weight)
    linear = ShardedLinear(part, Layout(10, weight.dtype, ""), None, shards)
    with pytest.raises(ModelError, match="stay on cpu, and were to go to meta"):
        linear.to("meta")
    linear.part = part.clone()
    with pytest.raises(FxrlError, match="it was copied or moved; load the model where"):
        linear(draw(3, 6))


def test_an_adapter_goes_beside_it_and_no_merge_does():
    pytest.importorskip("peft")
    model = lora(load_model("tiny:llama:layers=1", "fp64")[0], r=2)
    expected = model(torch.arange(6)[None]).logits
    linears = {p: m for p, m in model.named_modules() if p.endswith("base_layer")}
    in_place(model, linears)
    assert model(torch.arange(6)[None]).logits.equal(expected)
    assert "its weight is shared out over ranks" in why_not_mergeable(model)
    with pytest.raises(AdapterError, match="its weight is shared out over ranks"):
        lora_sites(model)
    with pytest.raises(RuntimeError, match="single memory location"):
        model.merge_adapter()


def test_fp8_leaves_it_and_says_so():
    model = frozen(1)
    linears = {p: m for p, m in model.named_modules() if is_shared_out(m)}
    in_place(model, linears)
    step = fxrl.optimize(model, square_loss, fxrl.Config(precision="fp8", on_miss="ignore"))
    missed = [r for r in step.explain(ids_batch()).of_kind("missed") if r.pass_name == "fp8-lora"]
    assert len(missed) == len(linears)
    assert {r.reason for r in missed} == {
        "its weight is shared out over ranks, and a copy in FP8 would be whole on each"
    }
