"""However a batch lays its tokens out, head and layers are rewritten and the numbers are eager's.

A layout is a row of ``LAYOUTS``: how a batch of B rows and T tokens is made, how the loss reads it,
with which model, at which sizes. In float64, with misses as errors, its loss, metrics and every
gradient are compared. One graph does for all sizes but those of one row or one target.
"""

import copy
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils import _pytree as pytree

from fxrl import Config, optimize
from tests.capture.mixer import fixed
from tests.rows import rows

transformers = pytest.importorskip("transformers")

#: Naming the layers' passes asks for them at every size; tiles of 8 rows split the heads unevenly.
CONFIG = Config(
    min_saved_bytes=0,
    chunk_tokens=8,
    compile_regions=False,
    on_miss="error",
    passes=("restore-causal-attention", "fuse-linear-logprob", "chunk-vocab-region", "recompute"),
)
HEADS = {"fuse-linear-logprob", "chunk-vocab-region"}
VOCAB, WIDTH, PAD = 19, 8, 0  # a head is a product that widens


# ---------------------------------------------------------------------------- models
class Layer(nn.Module):
    """The least that is a layer: norm, product, activation, residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.norm
        return x + torch.tanh(self.up(normed))


Output = make_dataclass("Output", ["logits"])


class Tiny(nn.Module):
    """A language model without attention, for what the loss alone reads: 3 s instead of 12."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, input_ids=None, inputs_embeds=None, logits_to_keep=0):
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers:
            x = layer(x)
        return Output(self.head(x[:, -logits_to_keep:]))


def hugging_face(kind):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, pad_token_id=PAD,
        use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


MODELS = {"tiny": Tiny} | {kind: partial(hugging_face, kind) for kind in ("Qwen3", "Llama")}


# ---------------------------------------------------------------------------- batches
NAMES = ("ids", "mask", "old", "adv")
Rollout = make_dataclass("Rollout", NAMES)
set_attribute = object.__setattr__  # as pydantic and attrs have it, under a name of their own


class Model:
    """Sets what it is given past its own ``__setattr__``, as models of data do."""

    def __init__(self, **given):
        set_attribute(self, "__dict__", given)

    def __setattr__(self, name, value):
        set_attribute(self, name, value)

    def __copy__(self):
        return type(self)(**self.__dict__)


class Draw:
    """Random tensors for a batch of B rows and T tokens, the same each time."""

    def __init__(self, B, T):
        self.B, self.T = B, T
        self.generator = torch.Generator().manual_seed(100 * B + T)

    def ids(self, *shape):
        return torch.randint(1, VOCAB, shape, generator=self.generator)

    def real(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def mask(self, *shape):
        """Ones and zeros; the last column, hence some token of every row, counts."""
        drawn = torch.rand(shape, generator=self.generator) > 0.4
        drawn[..., -1] = True
        return drawn.double()

    def batch(self, **others):
        """The commonest: ids [B, T], what belongs to log-probs [B, T - 1], advantages [B]."""
        ids, shape = self.ids(self.B, self.T), (self.B, self.T - 1)
        scores = {"mask": self.mask(*shape), "old": self.real(*shape), "adv": self.real(self.B)}
        return {"ids": ids} | scores | others

    def parted(self, answer=None, **others):
        """Prompts, and completions of ``answer`` tokens with their scores."""
        B, answer = self.B, answer or (self.T + 1) // 2
        scores = {"mask": self.mask(B, answer), "old": self.real(B, answer), "adv": self.real(B)}
        ids = {"prompt": self.ids(B, self.T - answer), "ids": self.ids(B, answer)}
        return ids | scores | others

    def sequences(self):
        """Two of lengths of their own."""
        scores = {"old": [self.real(self.T - 1), self.real(self.T - 3)], "adv": [0.7, -1.25]}
        return {"ids": [self.ids(self.T), self.ids(self.T - 2)]} | scores

    def attention(self, padded):
        """Ones, but for the columns ``padded`` of the first row."""
        mask = torch.ones(self.B, self.T, dtype=torch.int64)
        mask[0, padded] = 0
        return mask

    def restarts(self):
        """Positions of two sequences in each row."""
        half = self.T // 2
        return torch.cat([torch.arange(half), torch.arange(self.T - half)]).repeat(self.B, 1)

    def packed(self, *shape):
        """The dense mask of those two sequences, ``[*shape, T, T]``, and their positions."""
        place = torch.arange(self.T)
        mask = (place[:, None] >= place) & (place[:, None] < self.T // 2).eq(place < self.T // 2)
        dense = torch.where(mask, 0.0, -1e9).double().repeat(*shape, 1, 1)
        return {"attention_mask": dense, "position_ids": self.restarts()}


# ---------------------------------------------------------------------------- what a loss reads
def gathered(logits, targets):
    return torch.log_softmax(logits, -1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def shifted(model, ids, **inputs):
    """Log-prob of each token but the first, [B, T - 1]."""
    return gathered(model(input_ids=ids, **inputs).logits[:, :-1], ids[:, 1:])


def mean(values, mask):
    return (values * mask).sum() / mask.sum()


def surrogate(logps, batch):
    """PPO's, and a metric. What has more columns than the log-probs begins later."""
    width = logps.shape[1]
    mask, old = batch["mask"][:, -width:], batch["old"][:, -width:]
    adv = batch["adv"][:, None] if batch["adv"].dim() == 1 else batch["adv"][:, -width:]
    ratio = (logps - old).exp()
    return -mean(ratio * adv, mask), {"ratio": mean(ratio.detach(), mask)}


def common(model, batch):
    return surrogate(shifted(model, batch["ids"]), batch)


def attended(model, batch):
    """With what else the model takes by name; positions count the tokens that are there."""
    inputs = {name: batch[name] for name in ("attention_mask", "position_ids") if name in batch}
    if "position_ids" not in inputs:
        inputs["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return surrogate(shifted(model, batch["ids"], **inputs), batch)


def apart(model, batch):
    logps = gathered(model(batch["ids"]).logits, batch["targets"])
    return -mean(logps, batch["mask"][:, -logps.shape[1] :])


def cross_entropy(model, batch):
    logits = model(batch["ids"]).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCAB), batch["labels"][:, 1:].reshape(-1))


def kept(model, batch):
    """Logits of the completion alone: TRL's way."""
    inputs = {"attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {}
    ids, keep = torch.cat([batch["prompt"], batch["ids"]], 1), batch["ids"].shape[1] + 1
    logits = model(input_ids=ids, logits_to_keep=keep, **inputs).logits
    return surrogate(gathered(logits[:, :-1], batch["ids"]), batch)


def kept_mask(model, batch):
    """As many logits as the mask has columns."""
    ids, keep = batch["ids"], batch["mask"].shape[1]
    logits = model(ids, logits_to_keep=keep + 1).logits
    return surrogate(gathered(logits[:, :-1], ids[:, -keep:]), batch)


def joined(model, batch):
    """All logits, of which the completion's are taken."""
    logps = shifted(model, torch.cat([batch["prompt"], batch["ids"]], 1))
    return surrogate(logps[:, -batch["ids"].shape[1] :], batch)


def cut(model, batch):
    """Prompts cut on the left to what a model takes, above as many completions as are scored."""
    answer, start = batch["ids"].shape[1], max(batch["attention_mask"].shape[1] - 7, 0)
    ids = torch.cat([batch["prompt"][:, start:], batch["ids"]], 1)
    logps = shifted(model, ids, attention_mask=batch["attention_mask"][:, start:])[:, -answer:]
    chosen, rejected = logps.sum(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def padded_list(model, batch):
    ids = pad_sequence(batch["ids"], batch_first=True, padding_value=PAD)
    adv, mask = torch.tensor(batch["adv"], dtype=torch.float64), (ids[:, 1:] != PAD).double()
    old = pad_sequence(batch["old"], batch_first=True)
    return surrogate(shifted(model, ids), {"old": old, "adv": adv, "mask": mask})


def list_in_a_row(model, batch):
    """A sequence's first token has no log-prob."""
    logps, first = shifted(model, torch.cat(batch["ids"])[None])[0], batch["ids"][0].shape[0]
    own = torch.cat([logps[: first - 1], logps[first:]])
    return -(own - torch.cat(batch["old"])).exp().mean()


def bounds(model, batch):
    """One row of many sequences, each between two bounds."""
    place, ends = torch.arange(1, batch["ids"].shape[1]), batch["cu_seqlens"]
    owner = torch.bucketize(place, ends[1:], right=True)
    return -mean(shifted(model, batch["ids"])[0] * batch["adv"][owner], place != ends[owner])


def documents(model, batch):
    """One row of many sequences, whose tokens know theirs."""
    inside = batch["document"][1:] == batch["document"][:-1]
    return -mean(shifted(model, batch["ids"])[0] * batch["weight"], inside)


def picked(model, batch):
    mask = batch["mask"]
    return -gathered(model(batch["ids"]).logits[:, :-1][mask], batch["ids"][:, 1:][mask]).mean()


def along(model, batch):
    """Picked and ordered by torch's ``take_along_dim``, which counts from the end, too."""
    ids = batch["ids"][:, 1:, None] - VOCAB
    logps = model(batch["ids"]).logits[:, :-1].log_softmax(-1).take_along_dim(ids, -1)[..., 0]
    first = torch.take_along_dim(logps, batch["mask"].argmax(-1, keepdim=True)[:1], dim=1)
    return -mean(logps, batch["mask"]) - first.square().mean()


def spaced(model, batch):
    """Weights along a sequence, and pairs of tokens, each one of an earlier and a later."""
    logps = shifted(model, batch["ids"])
    count = logps.shape[1]
    early, late = torch.triu_indices(count, count, 1)
    paired = F.logsigmoid(logps[:, early] - logps[:, late]).mean()
    return -(logps * torch.linspace(0.5, 1.5, steps=count)).mean() - paired


def counted(model, batch):
    """What a loop logs or sums over its ranks: counts and truths as tensors."""
    logps = shifted(model, batch["ids"])
    rows, tokens = torch.as_tensor(logps.shape)
    count = torch.asarray(len(batch["ids"])) * torch.as_tensor(logps.shape[1], dtype=torch.float64)
    low = torch.as_tensor(bool((logps.detach() < -3).any()))
    return -logps.sum() / count * torch.where(low, rows, tokens)


def preference(model, batch):
    """DPO's."""
    chosen, rejected = (shifted(model, batch["ids"]) * batch["mask"]).sum(-1).chunk(2)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def attributes(model, batch):
    return common(model, {name: getattr(batch, name) for name in NAMES})


def changed(model, batch):
    """What it reads of a copy, some of it another."""
    other = copy.copy(batch)
    other.mask = 2 * batch.mask
    return attributes(model, other)


def distilled(model, batch):
    """From its own logits, sharpened, chunk by chunk: each ``chunk`` counts its sizes itself."""
    logits = model(input_ids=batch["ids"]).logits[:, :-1]
    sharp = logits.detach() * 2
    pairs = zip(logits.chunk(3, 1), sharp.chunk(3, 1), strict=True)
    return -sum((s.softmax(-1) * z.log_softmax(-1)).sum() for z, s in pairs) / batch["ids"].numel()


def groups(model, batch):
    """Rewards against the group's own mean, as GRPO has them."""
    rewards, mask = batch["rewards"], batch["mask"].flatten(0, 1)
    adv = rewards - rewards.mean(1, keepdim=True)
    return -mean(shifted(model, batch["ids"].flatten(0, 1)) * adv.reshape(-1, 1), mask)


def embedded(model, batch):
    logits = model(inputs_embeds=batch["embeds"]).logits[:, :-1]
    return surrogate(gathered(logits, batch["ids"][:, 1:]), batch)


# ---------------------------------------------------------------------------- the table
class L(NamedTuple):
    name: str
    make: Callable[[Draw, int, int], Any]
    loss: Callable[[Any, Any], Any] = common
    model: str = "tiny"
    sizes: tuple[tuple[int, int], ...] = ((2, 6), (3, 9))  # B and T of each call


# fmt: off
ONE = ((2, 6),)  # where sizes are part of what is captured
LAYOUTS = [
    # Sizes of one, and what changes from call to call.
    L("one row", lambda d, B, T: d.batch(), sizes=((1, 6), (1, 9))),
    L("one row, mask T", lambda d, B, T: d.batch(mask=d.mask(B, T)), sizes=((1, 6), (1, 9))),
    L("one target a row", lambda d, B, T: d.batch(), sizes=((3, 2), (4, 2))),
    L("one target", lambda d, B, T: d.batch(), sizes=((1, 2), (1, 2))),
    L("many, then one of each", lambda d, B, T: d.batch(),
      sizes=((4, 8), (1, 7), (1, 2), (2, 3))),
    # Ids are [B, T]; what belongs to log-probs has T columns or T - 1.
    L("mask T-1, old T-1", lambda d, B, T: d.batch()),
    L("mask T, old T-1", lambda d, B, T: d.batch(mask=d.mask(B, T))),
    L("mask T-1, old T", lambda d, B, T: d.batch(old=d.real(B, T))),
    L("mask T, old T", lambda d, B, T: d.batch(mask=d.mask(B, T), old=d.real(B, T))),
    L("advantages [B, 1]", lambda d, B, T: d.batch(adv=d.real(B, 1))),
    L("advantages [B, T-1]", lambda d, B, T: d.batch(adv=d.real(B, T - 1))),
    L("targets apart", lambda d, B, T: d.batch(targets=d.ids(B, T), mask=d.mask(B, T)), apart),
    L("targets apart, mask one longer", lambda d, B, T: d.batch(
        targets=d.ids(B, T), mask=d.mask(B, T + 1)), apart),
    L("labels of -100", lambda d, B, T: d.batch(
        labels=d.ids(B, T).masked_fill(d.mask(B, T) == 0, -100)), cross_entropy),
    # Prompt and completion.
    L("apart, logits_to_keep", lambda d, B, T: d.parted(), kept),
    L("apart, all logits", lambda d, B, T: d.parted(), joined),
    L("apart, cut, in pairs", lambda d, B, T: d.parted(attention_mask=d.attention(slice(3))),
      cut, "Qwen3", ((2, 8), (2, 9))),
    L("one token of completion", lambda d, B, T: d.parted(1), kept),
    L("one token of completion, one row", lambda d, B, T: d.parted(1), kept,
      sizes=((1, 5), (1, 7))),
    L("joined, mask of the completion", lambda d, B, T: d.batch(mask=d.mask(B, T // 2)), kept_mask),
    # Lists of sequences, and many in a row.
    L("list, padded", lambda d, B, T: d.sequences(), padded_list, sizes=ONE),
    L("list, in one row", lambda d, B, T: d.sequences(), list_in_a_row, sizes=ONE),
    L("one sequence", lambda d, B, T: {"ids": d.ids(T), "mask": d.mask(T - 1)},
      lambda model, batch: -mean(shifted(model, batch["ids"][None])[0], batch["mask"])),
    L("cu_seqlens", lambda d, B, T: {
        "ids": d.ids(1, B * T), "cu_seqlens": T * torch.arange(B + 1).int(), "adv": d.real(B)},
      bounds, sizes=ONE),
    L("one row, vectors of its tokens", lambda d, B, T: {
        "ids": d.ids(1, T), "document": torch.arange(T) // 4, "weight": d.real(T - 1)}, documents,
      sizes=((1, 6), (1, 9))),
    L("tokens picked by the mask", lambda d, B, T: d.batch(mask=d.mask(B, T - 1).bool()), picked),
    L("tokens picked along", lambda d, B, T: d.batch(), along),
    L("distilled in chunks", lambda d, B, T: {"ids": d.ids(B, T)}, distilled,
      sizes=((2, 7), (3, 10))),
    L("weights along a sequence", lambda d, B, T: d.batch(), spaced),
    L("counts as tensors", lambda d, B, T: d.batch(), counted),
    L("chosen above rejected", lambda d, B, T: {
        "ids": d.ids(2 * B, T), "mask": d.mask(2 * B, T - 1)}, preference),
    L("[T, B]", lambda d, B, T: {"ids": d.ids(T, B), "mask": d.mask(T - 1, B)},
      lambda model, batch: -mean(shifted(model, batch["ids"].t()), batch["mask"].t()), sizes=ONE),
    L("[groups, samples, T]", lambda d, B, T: {
        "ids": d.ids(B, 4, T), "mask": d.mask(B, 4, T - 1), "rewards": d.real(B, 4)}, groups,
      sizes=ONE),
    # Containers, dtypes, strides.
    L("tensor", lambda d, B, T: d.ids(B, T), lambda model, ids: -shifted(model, ids).mean()),
    L("tuple", lambda d, B, T: tuple(d.batch().values()),
      lambda model, batch: common(model, dict(zip(NAMES, batch, strict=True)))),
    L("dataclass", lambda d, B, T: Rollout(**d.batch()), attributes),
    L("namespace", lambda d, B, T: SimpleNamespace(**d.batch()), attributes),
    L("object, copied and changed", lambda d, B, T: Model(**d.batch()), changed),
    L("nested", lambda d, B, T: {"tokens": d.batch(), "scores": ([d.real(B)], None, "text")},
      lambda model, batch: common(model, batch["tokens"] | {"adv": batch["scores"][0][0]})),
    L("BatchEncoding", lambda d, B, T: transformers.BatchEncoding(d.batch())),
    L("ids int32, mask bool", lambda d, B, T: d.batch(
        ids=d.ids(B, T).int(), mask=d.mask(B, T - 1).bool())),
    L("mask int64, old float32, advantages bf16", lambda d, B, T: d.batch(
        mask=d.mask(B, T).long(), old=d.real(B, T - 1).float(), adv=d.real(B).bfloat16())),
    L("strided and expanded", lambda d, B, T: d.batch(
        ids=d.ids(B, T + 4)[:, 2:-2], mask=d.mask(T - 1, B).t(), old=d.real(B, 2 * T)[:, 2::2],
        adv=d.real(B, 1).expand(B, T - 1))),
    L("much that nobody reads", lambda d, B, T: d.batch(
        images=d.real(B, 3, 4, 4), wider=d.ids(B, 2 * T), step=torch.tensor(3), none=None)),
    L("inputs_embeds with a gradient", lambda d, B, T: d.batch(
        embeds=d.real(B, T, WIDTH).requires_grad_()), embedded),
    # What the model reads too.
    L("left-padded", lambda d, B, T: d.batch(attention_mask=d.attention(slice(2))), attended,
      "Qwen3"),
    L("right-padded", lambda d, B, T: d.batch(attention_mask=d.attention(slice(-2, None))),
      attended, "Qwen3"),
    L("no padding", lambda d, B, T: d.batch(attention_mask=d.attention(slice(0))), attended,
      "Qwen3"),
    L("left-padded, logits_to_keep", lambda d, B, T: d.parted(
        attention_mask=d.attention(slice(2))), kept, "Llama"),
    L("packed", lambda d, B, T: d.batch(position_ids=d.restarts()), attended, "Qwen3",
      ((1, 6), (1, 9))),
    L("packed, dense mask", lambda d, B, T: d.batch(**d.packed(B, 1)), attended, "Qwen3"),
    L("packed, one dense mask", lambda d, B, T: d.batch(**d.packed(1, 1)), attended, "Qwen3"),
]
# fmt: on


# ---------------------------------------------------------------------------- the test
@pytest.fixture(scope="module")
def steps():
    """By model, loss and kind of batch: left- and right-padded ones need no step each."""
    torch._dynamo.reset()
    yield {}
    torch._dynamo.reset()


#: Each way of theirs to lay out tokens or scores is another layout's, too.
SELDOM = (
    "apart, all logits",
    "chosen above rejected",
    "joined, mask of the completion",
    "nested",
    "one sequence",
    "packed, dense mask",
    "one row",
    "one target a row",
    "mask T-1, old T-1",
    "mask T, old T",
    "advantages [B, T-1]",
    "one token of completion",
    "namespace",
    "one row, mask T",
    "mask T-1, old T",
    "mask T, old T-1",
    "advantages [B, 1]",
    "targets apart, mask one longer",
    "one token of completion, one row",
    "tuple",
    "left-padded, logits_to_keep",
    "packed, one dense mask",
)


@pytest.mark.parametrize("name", rows([layout.name for layout in LAYOUTS], SELDOM))
def test_head_and_layers_are_rewritten(name, steps):
    (layout,) = (layout for layout in LAYOUTS if layout.name == name)
    batches = [layout.make(Draw(*size), *size) for size in layout.sizes]
    key = layout.model, layout.loss, str(pytree.tree_map(kind, batches[0]))
    if key not in steps:
        torch._dynamo.reset()
        torch.manual_seed(0)
        steps[key] = optimize(MODELS[layout.model]().double(), layout.loss, CONFIG)
    step = steps[key]
    for batch in batches:
        wanted = evaluated(step.model, batch, partial(layout.loss, step.model))
        got = evaluated(step.model, batch, step)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    for capture in step.captures:
        applied = {remark.pass_name for remark in capture.report.of_kind("applied")}
        assert applied & HEADS
        assert "outline-layers" in applied
        assert capture.running
    assert 1 <= len(step.captures) <= len({(B > 1, T > 2) for B, T in layout.sizes})


def kind(leaf):
    tensor = isinstance(leaf, torch.Tensor)
    return (leaf.dtype, leaf.shape, leaf.stride()) if tensor else repr(leaf)


def evaluated(model, batch, run):
    """Loss, metrics and every gradient, of the batch's leaves too."""
    result = run(batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    named = dict(model.named_parameters())
    named |= {f"batch {i}": leaf for i, leaf in enumerate(pytree.tree_leaves(batch))}
    named = {k: x for k, x in named.items() if isinstance(x, torch.Tensor) and x.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    gradients = {name: g for name, g in zip(named, found, strict=True) if g is not None}
    assert max(g.abs().max() for g in gradients.values()) > 1e-6
    return {"loss": loss.detach()} | metrics | gradients


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_site_has_one_name_in_batches_of_one_row_and_of_several(bias, frozen):
    """A head that is a batched product of several rows is a plain one of a single row, which adds
    its bias itself; the plan of either is obeyed for both."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40, bias=bias)).double()
    model[1].requires_grad_(not frozen)  # PyTorch folds rows into one product if it is trained

    def loss_fn(model, batch):
        hidden = model[0](batch["ids"])[:, :-1]
        return F.cross_entropy(model[1](hidden).mT, batch["ids"][:, 1:])

    def planned(rows, plan=None):
        batch = fixed({"ids": torch.randint(0, 40, (rows, 9))})
        config = Config(min_saved_bytes=0, chunk_tokens=4, on_miss="error")
        step = optimize(model, loss_fn, config, plan=plan)
        torch.testing.assert_close(step(batch), loss_fn(model, batch))
        return step.plan

    one, several = planned(1), planned(3)
    trained = [] if frozen or bias else ["0:1/mm.linear_logprob"]  # may keep its exponentials
    assert [*one.choices] == [*several.choices] == ["0:1/mm", *trained]
    assert planned(3, one).choices == planned(1, several).choices == one.choices
