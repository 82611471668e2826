"""Sequences shared by 2 and 4 ranks: loss, metrics and every gradient are those of one process.

In float64, to 1e-12. What the pass does to graphs: ``tests/passes/test_shard_sequence.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from fxrl import distributed, losses
from fxrl.config import Config
from fxrl.errors import FxrlError, PlanError
from fxrl.ir.pipeline import Pipeline
from fxrl.ir.plan import CutLayer, Plan
from fxrl.models import quantize
from fxrl.ops.context_parallel import told_by_first
from fxrl.step import TrainStep, optimize
from tests.capture.mixer import fixed
from tests.compile.shared_sequences import Model, batch_of, in_ranks, silent_group
from tests.rows import rows


@dataclass
class Case:
    """A step that is captured with the first batch and runs all of them. Sizes vary with them.

    Attributes:
        sharing: ranks that share a sequence, by default all; then each such group has its own part
            of the batches.
        head: whether the loss head is fused, too.
        plan: choices for layers; then the step runs by plans.
        precision: of products with frozen weights; in FP8 what is compared with is one rank's step.
    """

    ranks: int
    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batches: list[dict[str, Any]]
    head: bool = True
    tolerance: float = 1e-12
    passes: tuple[str, ...] | None = None
    sharing: int | None = None
    plan: Plan | None = None
    precision: Literal["bf16", "fp8"] = "bf16"
    step: TrainStep = field(init=False)
    alone: TrainStep = field(init=False)


# ---------------------------------------------------------------------------- losses
def logps_of(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]


def ratios(model: Model, batch: dict[str, Tensor]) -> Any:
    """A clipped ratio and a sequence-level one, entropy, and metrics for each token."""
    logits, mask = model(batch)[:, :-1] / 0.7, batch["mask"]
    logp = logps_of(logits, batch["input_ids"][:, 1:])
    entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    count = mask.sum(1).clamp(min=1)
    by_token = torch.exp(logp - batch["old"])
    by_sequence = (((logp - batch["old"]) * mask).sum(1) / count).exp()
    gain = torch.minimum(by_token, by_token.clamp(0.8, 1.2)) * batch["advantages"][:, None]
    loss = -(gain * mask).sum() / mask.sum() - (by_sequence * batch["advantages"]).mean()
    first = by_token.detach().masked_fill(~mask, -torch.inf).amax(1)
    return loss - 0.1 * entropy[mask].mean(), {"logp": logp, "entropy": entropy, "first": first}


def classes(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """A mean over rows and tokens alike, shifted by hand."""
    labels = F.pad(batch["input_ids"][:, 1:], (0, 1), value=-100)
    logits = model(batch)
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), ignore_index=-100)


def penalties(model: Model, batch: dict[str, Tensor]) -> Any:
    """Weights that are read as a whole, too; a value head; the value of the last token."""
    hidden = model.hidden(batch)
    weight = model.head.weight * model.value.weight
    logp = logps_of(hidden @ weight.t(), batch["input_ids"])
    values = model.value(hidden)[..., 0]
    size = sum(p.pow(2).sum() for p in (model.embed.weight, model.layers[0].kv.weight, weight))
    return (values.cumsum(1) * logp).mean() + values[:, -1].sum() + 0.1 * size


def late(model: Model, batch: dict[str, Tensor]) -> Tensor:
    """The last columns alone, and the first token's own."""
    hidden = model.hidden(batch)[:, -4:-1]
    logits = model.head(hidden)
    return -logps_of(logits, batch["input_ids"][:, -3:]).mean() + model.value(hidden).std()


FAMILY = {
    name: getattr(losses, name)()
    for name in ["grpo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo", "luspo", "reinforce"]
}


def policy_losses(*names: str) -> Callable[[nn.Module, dict[str, Tensor]], Any]:
    """Losses of the GRPO family over one forward; a gradient of each goes into the sum."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        columns = batch["completion_mask"].shape[1]
        given = {k: batch[k] for k in ("input_ids", "attention_mask", "position_ids") if k in batch}
        output = model(**given, logits_to_keep=columns + 1)
        total, metrics = 0.0, {}
        for weight, name in enumerate(names, 1):
            loss, found = FAMILY[name](lambda **_: output, batch)
            total = total + weight * loss
            metrics[name] = loss.detach()
            metrics |= {f"{name}/{key}": value for key, value in found.items()}
        return total, metrics

    return loss_fn


def hf_model(kind: str, *, full: bool = True, **sizes: int) -> nn.Module:
    from tests.compile.test_architectures import tiny_model

    return tiny_model(kind, full=full)


def hf_batch(prompt: int, completion: int, *, packed: bool = False) -> dict[str, Any]:
    rows = 1 if packed else 3
    draw = torch.Generator().manual_seed(prompt)

    def noise(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=draw, dtype=torch.float64)

    length = prompt + completion
    batch = {
        "input_ids": torch.randint(3, 250, (rows, length), generator=draw),
        "completion_mask": noise(rows, completion) > 0.3,
        "advantages": noise(rows) - 0.5,
        "old_logps": -4 - noise(rows, completion),
        "ref_logps": -4 - noise(rows, completion),
    }
    if packed:
        ends = torch.tensor([0, length // 3, length // 2 + 1, length])
        batch["position_ids"] = torch.cat([torch.arange(n) for n in ends.diff()])[None]
    else:
        batch["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
        batch["attention_mask"][0, :2] = 0
    return batch


def with_gradients(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rows, tokens = batch["input_ids"].shape
    draw = torch.Generator().manual_seed(9)
    for name, shape in {"shift": (rows, tokens, 24), "scale": (24,)}.items():
        value = torch.randn(*shape, generator=draw, dtype=torch.float64)
        batch[name] = value.requires_grad_()
    return batch


def lengths(*tokens: int, padded: bool = False) -> list[dict[str, Tensor]]:
    return [batch_of(n, padded=padded) for n in tokens]


def with_adapters() -> nn.Module:
    """Frozen Linears with LoRA beside them; its second factors are not zeros, as they begin."""
    import peft

    config = peft.LoraConfig(r=2, target_modules=["q", "kv", "o", "up", "down"])
    model = peft.get_peft_model(Model(hidden=64), config).double()  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(generator=draw)
    return model.base_model.model  # type: ignore[no-any-return, union-attr]


HEADS = ("fuse-linear-logprob", "chunk-vocab-region")
CASES = {
    "cross entropy, any length": Case(2, Model, classes, lengths(7, 3, 4, 6, 8, 9, 15, 16, 23)),
    "weights and values": Case(2, Model, penalties, lengths(6, 5, 9), head=False),
    "biases by head": Case(2, lambda: Model(slopes=4), classes, lengths(6)),
    "biases for all heads": Case(4, lambda: Model(slopes=1), penalties, lengths(6), head=False),
    "checkpointed layers": Case(2, lambda: Model(checkpointed=True), classes, lengths(7)),
    "last columns": Case(2, Model, late, lengths(9, 8)),
    "gradients of the batch": Case(
        2, Model, ratios, [with_gradients(batch) for batch in lengths(5, 8)]
    ),
    "more ranks than heads of keys, any length": Case(
        4, Model, ratios, lengths(9, *range(5, 9), 11, 16, 18)
    ),
    "pairs of four ranks, each with its own batches": Case(
        4, Model, ratios, lengths(8, 3, 5, 7, padded=True), sharing=2
    ),
    "run again and offloaded": Case(
        2,
        lambda: Model(layers=2),
        ratios,
        lengths(7, 4, 8, padded=True),
        passes=("outline-layers", "recompute", "offload", *HEADS),
        plan=Plan(
            {
                "0:layers.0": CutLayer("inputs", "host"),
                "0:layers.1": CutLayer("fewest", "gpu", "host"),
            }
        ),
    ),
    # A row's scale is its own, so ranks round as one does.
    "frozen weights in FP8": Case(
        2, with_adapters, ratios, lengths(7), head=False, precision="fp8"
    ),
    "weights held in 4 bits": Case(
        2, lambda: quantize(with_adapters(), "nf4"), ratios, lengths(6), head=False
    ),
    "a token a rank, and fewer": Case(
        4, Model, ratios, lengths(4, 3), passes=("chunk-vocab-region",)
    ),
    "as many ranks as heads of keys, padded": Case(
        4, lambda: Model(groups=4), ratios, lengths(10, 5, padded=True)
    ),
    "the GRPO family": Case(
        2,
        lambda: hf_model("qwen3", full=False),
        policy_losses(*FAMILY),
        [hf_batch(4, 5)],
    ),
    # One of tokens' ratios, one of sequences'.
    "the GRPO family, packed": Case(
        4,
        lambda: hf_model("llama"),
        policy_losses("grpo", "gspo"),
        [hf_batch(8, 5, packed=True)],
    ),
    # Gemma's norms are computed in float32, the gradients of their weights included.
    "windows": Case(
        2, lambda: hf_model("gemma3"), losses.grpo(), [hf_batch(40, 5)], tolerance=1e-8
    ),
    "experts": Case(4, lambda: hf_model("mixtral"), losses.dapo(), [hf_batch(4, 5)]),
}


#: As the first case, of two ranks; and padded as pairs of ranks are. As biases by head.
SELDOM = ("as many ranks as heads of keys, padded", "biases for all heads")


def make_step(case: Case) -> None:
    """The step, not captured yet: making another model may change what Dynamo guards."""
    config = Config(
        min_saved_bytes=0,
        chunk_tokens=8,
        compile_regions=False,
        on_miss="ignore",
        context_parallel=case.sharing or case.ranks,
        passes=case.passes,
        gpu_memory=None if case.plan is None else "1GiB",
        precision=case.precision,
    )
    case.step = optimize(case.model(), case.loss_fn, config, plan=case.plan)
    case.alone = optimize(case.step.model, case.loss_fn, replace(config, context_parallel=1))


def outcome(run: Callable[[Any], Any], model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """Loss, metrics, and the gradients of weights and batch, of two backward passes together."""
    leaves = dict(model.named_parameters()) | {n: x for n, x in batch.items() if x.requires_grad}
    for leaf in leaves.values():
        leaf.grad = None
    result = run(batch)
    loss, metrics = result if isinstance(result, tuple) else (result, {})
    loss.backward()
    (0.5 * run(batch)[0] if metrics else 0.5 * run(batch)).backward()
    grads = {f"grad of {name}": leaf.grad for name, leaf in leaves.items()}
    return {"loss": loss.detach()} | metrics | grads


def differences(case: Case) -> list[str]:
    """What of a case is not as one process has it, over all its batches."""
    model, found = case.step.model, []
    sharing = case.sharing or case.ranks
    for batch in case.batches[dist.get_rank() // sharing :: case.ranks // sharing]:
        one = case.alone if case.precision == "fp8" else partial(case.loss_fn, model)
        eager = outcome(one, model, batch)
        ours = outcome(case.step, model, batch)
        for name, want in eager.items():
            have = ours[name]
            if (want is None) != (have is None):
                found.append(f"{name} is {have}, not {want}")
            elif want is not None and not close(have, want, case.tolerance):
                tokens = batch["input_ids"].shape[1]
                found.append(f"{name} of {tokens} tokens is off by {(have - want).abs().max()}")
    if case.plan is not None:
        plan = case.step.plan
        if any(plan.choices.get(site) != choice for site, choice in case.plan.choices.items()):
            found.append(f"planned {plan}")
    captures = len(case.step.captures)
    return found + ([] if captures == 1 else [f"captured {captures} times"])


def all_differences(cases: dict[str, Case]) -> dict[str, list[str]]:
    return {name: differences(case) for name, case in cases.items()}


def close(have: Tensor, want: Tensor, tolerance: float) -> bool:
    scale = max(1.0, float(want.detach().nan_to_num(0, 0, 0).abs().max())) if want.numel() else 1.0
    return torch.allclose(have, want, rtol=0, atol=tolerance * scale, equal_nan=True)


@pytest.fixture(scope="module")
def found(request):
    """Case -> rank -> what differs; ``tests/passes`` checks the pass's fake values."""
    test = test_loss_metrics_and_gradients_are_those_of_one_process
    asked = [x.callspec.params["name"] for x in request.session.items if x.function is test]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pipeline, "check_values", False)
        yield found_by_ranks({name: CASES[name] for name in asked})


def found_by_ranks(cases: dict[str, Case]) -> dict[str, list[list[str]]]:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.compiler.reset()
    results: dict[str, list[list[str]]] = {}
    for ranks in sorted({case.ranks for case in cases.values()}):
        mine = {name: case for name, case in cases.items() if case.ranks == ranks}
        with silent_group(ranks):
            for case in mine.values():
                make_step(case)
            for case in mine.values():
                if len(case.batches) == 1:
                    fixed(case.batches)
                case.step(case.batches[0])  # captured and compiled; the numbers are nobody's
                if case.precision == "fp8":
                    case.alone(case.batches[0])
        told = in_ranks(ranks, partial(all_differences, mine))
        results |= {name: [one[name] for one in told] for name in mine}
    return results


@pytest.mark.parametrize("name", rows(CASES, SELDOM))
def test_loss_metrics_and_gradients_are_those_of_one_process(found, name):
    assert found[name] == [[]] * CASES[name].ranks
    applied = {r.pass_name for r in CASES[name].step.report.of_kind("applied")}
    assert "shard-sequence" in applied
    assert not CASES[name].head or applied & {*HEADS}
    assert CASES[name].precision != "fp8" or "fp8-lora" in applied
    assert applied >= {*(CASES[name].passes or ())} - {*HEADS}


def of_the_first() -> list[str]:
    """What each of two ranks hears of what the first makes, or fails to."""

    def refused() -> str:
        if dist.get_rank():
            raise AssertionError("only the first makes it")
        raise PlanError("no plan fits")

    heard = []
    rank = str(dist.get_rank())
    for make, inputs in ((lambda: f"by {rank}", "graph"), (refused, "graph"), (refused, rank)):
        try:
            heard.append(told_by_first(make, inputs, 2))
        except FxrlError as error:
            heard.append(f"{type(error).__name__}: {error}")
    return heard


def test_the_first_rank_plans_for_all_and_a_refusal_is_everybodys():
    """Under the graph's hash: ranks that captured different ones hear of it."""
    for made, refused, different in in_ranks(2, of_the_first):
        assert made == "by 0"
        assert refused == "PlanError: no plan fits"
        assert "ranks [0, 1] of 2 that share sequences have captured different graphs" in different
        assert "graphs: '0' is '1' elsewhere; give them the same" in different


def of_one_rank_alone() -> list[str]:
    """What each of two ranks hears where the second one has something else than the first."""
    heard, rank = [], dist.get_rank()
    for what in ("ids", "length", "flag", "weights"):
        model, batch = Model(), batch_of(6 + (rank if what == "length" else 0))
        batch["flag"] = rank if what == "flag" else float("nan")  # type: ignore[assignment]
        if rank and what == "ids":
            batch["input_ids"] = batch["input_ids"].flip(0)
        if rank and what == "weights":
            model.head.weight.data[3, 3] += 1
        try:
            optimize(model, classes, Config(context_parallel=2))(batch)
        except FxrlError as error:
            heard.append(str(error))
    return heard


def test_ranks_that_share_sequences_have_the_same_batch_and_weights():
    """Others would give numbers that are nobody's, or leave ranks waiting."""
    for heard in in_ranks(2, of_one_rank_alone):
        differing = [text.partition(" have different ")[2].partition(";")[0] for text in heard]
        assert differing == [
            "batches: batch['input_ids']",
            "batches: batch['input_ids'], batch['old'], batch['mask']",
            "batches: batch['flag']",
            "weights: head.weight",
        ]
        assert all("ranks 0 and 1 of 2 that share sequences" in text for text in heard)


def sums_of_gradients(most: int) -> list[list[float]]:
    distributed.BUCKET_BYTES = most
    rank = dist.get_rank()
    kinds = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float32)
    given = [torch.full((n, 2), rank + n, dtype=kind) for n, kind in enumerate(kinds, 1)]
    sums = torch.ops.fxrl.sum_over_ranks(given, 2)
    assert [(s.dtype, s.shape) for s in sums] == [(g.dtype, g.shape) for g in given]
    return [total.flatten().tolist() for total in sums]


@pytest.mark.parametrize("most", [1, 40, 2**29])  # bytes: one by one, some, all at once
def test_gradients_are_summed_some_at_a_time(most: int) -> None:
    for found in in_ranks(2, partial(sums_of_gradients, most)):
        assert found == [[2.0 * n + 1] * 2 * n for n in range(1, 5)]
