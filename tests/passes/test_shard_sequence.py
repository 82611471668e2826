"""``shard-sequence``: what it makes of a graph, and every reason against it; no rank runs.

Numbers: ``tests/compile/test_context_parallel.py``.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxrl.config import Config
from fxrl.errors import ConfigError
from fxrl.ir.bodies import graphs_of
from fxrl.ir.graph import inputs_of
from fxrl.ir.pipeline import Pipeline
from fxrl.ir.plan import Plan
from fxrl.ops.context_parallel import join_group
from fxrl.passes.shard_sequence import ShardSequence
from tests.compile.shared_sequences import Model, batch_of
from tests.compile.test_context_parallel import classes, ratios
from tests.graphs import lowered_graph


def shared(loss_fn, model=None, ranks=2, tokens=7, batch=None):
    """The rewritten graph and the pass's one remark."""
    torch.compiler.reset()
    gm = lowered_graph(model or Model(), loss_fn, batch or batch_of(tokens))
    made = Pipeline((ShardSequence(ranks),)).run(gm, Plan())
    (remark,) = made.report.remarks
    return made.gm, remark


def calls(gm, name):
    return [n for g in graphs_of(gm) for n in g.nodes if str(n.target) == f"fxrl.{name}.default"]


def test_applied():
    gm, remark = shared(ratios, Model(layers=2))
    assert (remark.kind, remark.reason) == (
        "applied",
        "2 ranks share the tokens, and the heads in 2 attentions",
    )
    moved, *_ = calls(gm, "seq_to_head")
    assert len(calls(gm, "seq_to_head")) == len(calls(gm, "head_to_seq")) == 2
    assert [str(x.shape[1]) for x in moved.meta["val"]] == ["2", "1", "1"]
    gathered = calls(gm, "gather_tokens")
    assert len(gathered) == 2  # log-probabilities and entropies
    assert all(node.meta["val"].dim() == 2 for node in gathered)
    marked = [n for n in inputs_of(gm.graph) if "summed_over" in n.meta]
    assert len(marked) == len(list(Model(layers=2).parameters())) - 2  # no value head here


def test_fewer_heads_of_keys_than_ranks():
    gm, _ = shared(classes, ranks=4)
    (moved,) = calls(gm, "seq_to_head")
    assert [x.shape[1] for x in moved.meta["val"]] == [1, 1, 1]
    assert [node.meta["val"].shape[1] for node in moved.args[0]] == [4, 4, 4]


def test_one_rank_shares_nothing():
    gm = lowered_graph(Model(), classes, batch_of(5))
    made = Pipeline((ShardSequence(),)).run(gm, Plan())
    assert not made.report.remarks
    assert not calls(made.gm, "shard_tokens")


def test_one_token_is_not_shared():
    gm, remark = shared(classes, tokens=1)
    assert remark.kind == "missed"
    assert remark.reason.startswith("its sequences have one token each")
    assert not calls(gm, "shard_tokens")


def mean_pool(model, batch):
    return model.head(model.hidden(batch).mean(1)).logsumexp(-1).sum()


def last_token(model, batch):
    return model.head(model.hidden(batch)[:, -1]).logsumexp(-1).sum()


def neighbours(model, batch):
    hidden = model.hidden(batch)
    return model.head(hidden[:, 1:] - hidden[:, :-1]).logsumexp(-1).sum()


def convolved(model, batch):
    hidden = model.hidden(batch).transpose(1, 2)
    return F.conv1d(hidden, torch.ones(1, 24, 2, dtype=hidden.dtype)).sum()


def dropped(model, batch):
    return model.head(F.dropout(model.hidden(batch), 0.1)).logsumexp(-1).sum()


def reversed_tokens(model, batch):
    return model.head(model.hidden(batch).flip(1)).logsumexp(-1).sum()


def by_products(model, batch):
    hidden = model.hidden(batch)
    return model.head((hidden @ hidden.mT).softmax(-1) @ hidden).logsumexp(-1).sum()


def chosen_rows(model, batch):
    return model.head(model.hidden(batch)[:, 1:][batch["mask"]]).sum()


def everything(model, batch):
    logits = model(batch)
    return logits.logsumexp(-1).sum(), {"logits": logits}


def joined(model, batch):
    hidden = model.hidden(batch)
    return model.head(torch.cat([hidden, hidden], 1)).logsumexp(-1).sum()


class NoIds(nn.Module):
    """Takes vectors and no ids."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(24, 29, bias=False).double()

    def forward(self, batch):
        return self.head(batch["vectors"])


@pytest.mark.parametrize(
    ("loss_fn", "ranks", "reason"),
    [
        pytest.param(mean_pool, 2, "mean runs over the tokens", marks=pytest.mark.slow),
        (last_token, 2, "one token of each sequence is picked"),
        (neighbours, 2, "sub.Tensor combines different tokens"),
        pytest.param(
            convolved, 2, "convolution.default may mix the tokens", marks=pytest.mark.slow
        ),
        (dropped, 2, "draws random numbers"),
        (reversed_tokens, 2, "flip.default runs over the tokens"),
        (by_products, 2, "a product pairs tokens with tokens"),
        pytest.param(chosen_rows, 2, "index.Tensor may mix the tokens", marks=pytest.mark.slow),
        (everything, 2, "values as wide as this leave the traced code"),
        (joined, 2, "cat.default runs over the tokens"),
        (classes, 3, "4 query heads do not divide among 3 ranks"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_mixes_tokens_is_a_miss(loss_fn, ranks, reason):
    gm, remark = shared(loss_fn, ranks=ranks)
    assert remark.kind == "missed"
    assert reason in remark.reason.replace("mean.dim", "mean")
    assert ".py:" in remark.source
    assert not calls(gm, "shard_tokens") + calls(gm, "seq_to_head")


def test_a_graph_without_ids_is_a_miss():
    batch = {"vectors": torch.randn(2, 7, 24, dtype=torch.float64)}
    _, remark = shared(lambda model, b: model(b).logsumexp(-1).sum(), NoIds(), batch=batch)
    assert "no token ids are embedded" in remark.reason


@pytest.mark.parametrize(
    ("value", "said"), [(0, "below 1"), (-2, "below 1"), (2.0, "whole number"), (True, "whole")]
)
def test_a_number_of_ranks_that_cannot_be(value, said):
    with pytest.raises(ConfigError, match=said):
        Config(context_parallel=value)


def test_ranks_that_do_not_run_are_an_error_with_its_cure():
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 2"):
        join_group(2)
