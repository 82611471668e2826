"""Models in wrappers: DDP and FSDP2 keep the rewrite and their gradients; others are misses."""

from __future__ import annotations

import sys
import types
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from fxrl import Config
from fxrl.capture.wrappers import Wrapper
from fxrl.errors import ConfigError, MissedRewriteError
from fxrl.ir.on_miss import MissedRewriteWarning
from fxrl.models import shard
from fxrl.step import optimize
from tests.capture.mixer import (
    CONFIG,
    QUIET,
    VOCAB,
    WIDTH,
    Mixer,
    assert_matches_eager,
    assert_same,
    captures,
    fixed,
    fused,
    grads,
    make_batch,
    make_model,
    outcome,
    policy_loss,
    token_logps,
)
from tests.forked import in_processes


class WithSpare(Mixer):
    """A module that the forward leaves out: DDP must find its parameters unused."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)


KINDS: list[tuple[type[Mixer], dict[str, Any]]] = [
    (Mixer, {}),
    (Mixer, {"static_graph": True}),
    (WithSpare, {"find_unused_parameters": True}),
]


def as_ddp_does(rank: int, kind: type[Mixer], options: dict[str, Any]) -> None:
    """Three synchronised steps, one accumulated without sync: gradients as with eager's DDP."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = DistributedDataParallel(kind(), **options)
    eager = DistributedDataParallel(kind(), **options)
    eager.load_state_dict(model.state_dict())
    step = optimize(model, policy_loss, CONFIG)

    def both(seed: int) -> None:
        batch = fixed(make_batch(seed=10 * seed + rank))
        for loss in (policy_loss(eager, batch), step(batch)):
            loss.backward()

    for seed in range(3):
        both(seed)
        assert_same(grads(model), grads(eager))
    with model.no_sync(), eager.no_sync():
        both(3)
    alone = model.module.mix.weight.grad.clone()
    both(4)
    assert_same(grads(model), grads(eager))
    others = [torch.empty_like(alone) for _ in range(2)]
    dist.all_gather(others, alone)
    assert not torch.equal(*others), "no_sync must leave each process its own gradient"
    # One process with both batches, whose two processes accumulate over two calls each.
    one = kind()
    one.load_state_dict(model.module.state_dict())
    for seed in (5, 6):
        with model.no_sync() if seed == 5 else nullcontext():
            step(fixed(make_batch(seed=10 * seed + rank))).backward()
        for other in range(2):
            (policy_loss(one, make_batch(seed=10 * seed + other)) / 2).backward()
    wanted, got = grads(one), grads(model)
    assert_same({name: got[f"module.{name}"] for name in wanted}, wanted, 1e-12)
    assert fused(step)
    assert captures(step) == 1


def process(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    for kind, options in KINDS:
        as_ddp_does(rank, kind, options)
    as_whole_weights_do(rank)
    as_metrics_are_gathered(rank)
    for unit in (False, True):
        as_fsdp_does(rank, unit)
    as_tensor_parallelism_does(rank)
    if rank == 0:  # another process takes no part, so any communication would never end
        model = DistributedDataParallel(make_model(), broadcast_buffers=True, init_sync=False)
        assert optimize(model, policy_loss, CONFIG).explain(make_batch()).of_kind("applied")
    dist.barrier()
    dist.destroy_process_group()


def as_whole_weights_do(rank: int) -> None:
    """The cure of sharding: frozen weights shared out, under DDP, the rewrite kept."""
    torch._dynamo.reset()
    model, whole = make_model(), make_model()
    whole.load_state_dict(model.state_dict())
    for one in (model, whole):
        one.embed.requires_grad_(False)
        one.head.requires_grad_(False)
    model, whole = (DistributedDataParallel(one) for one in (shard(model), whole))
    step, batch = optimize(model, policy_loss, CONFIG), fixed(make_batch(seed=rank))
    for loss in (policy_loss(whole, batch), step(batch)):
        loss.backward()
    torch.testing.assert_close(model.module.mix.weight.grad, whole.module.mix.weight.grad)
    assert fused(step)


def as_fsdp_does(rank: int, unit: bool) -> None:
    """``fully_shard``: the layer a unit of its own or not, gradients accumulated, a call scored, a
    loss that raised: all as with eager's."""
    torch._dynamo.reset()
    model, eager = whole = make_model(), make_model()
    for one in whole:
        if unit:
            fully_shard(one.mix)
        fully_shard(one)
    step = optimize(model, checked_loss, CONFIG)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in whole]
    for seed in range(3):
        for micro in range(2):
            for one in whole:
                one.set_requires_gradient_sync(micro == 1)
            batch = make_batch(length=5 + seed, seed=10 * seed + 2 * micro + rank, spoilt=False)
            for loss in (policy_loss(eager, batch), step(batch)):
                loss.backward()
        got, wanted = (
            {name: p.grad.full_tensor() for name, p in one.named_parameters()} for one in whole
        )
        assert_same(got, wanted)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert_same(step(batch), policy_loss(eager, batch))
        if seed == 1:
            with pytest.raises(ValueError, match="spoilt"):
                step(batch | {"spoilt": True})
    assert fused(step)


def checked_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss = policy_loss(model, batch)
    if batch["spoilt"]:
        raise ValueError("a spoilt batch")
    return loss


def as_tensor_parallelism_does(rank: int) -> None:
    """What FSDP gathers is then still a part: the wrapper stays closed. In processes of their own,
    for a process with such a mesh is not to fork, as other tests do."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(make_model(), mesh["tensor"], {"mix": ColwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    (told,) = Wrapper.of(model).report.of_kind("missed")
    assert "FSDP gathers" in told.reason
    assert "give each rank a whole model" in told.cure


def as_metrics_are_gathered(rank: int) -> None:
    """Python objects go through process groups, of which Dynamo traces no member."""

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss = policy_loss(model, batch)
        of_all: list[Any] = [None, None]
        dist.all_gather_object(of_all, {"loss": loss.item()})
        return loss, {"mean": torch.tensor([one["loss"] for one in of_all]).mean()}

    model, batch = make_model(), fixed(make_batch(seed=rank))
    step = optimize(model, loss_fn, CONFIG)
    for _ in range(2):
        torch.testing.assert_close(step(batch), loss_fn(model, batch))
    assert fused(step)


def test_wrappers_in_two_processes(tmp_path: Path) -> None:
    in_processes(process, f"file://{tmp_path}/store")


@pytest.mark.usefixtures("one_rank")
def test_attributes_and_hooks_of_the_wrapper_are_seen() -> None:
    """The loss gets the wrapper itself: its type, its module, its own hooks."""
    model = DistributedDataParallel(make_model())
    model.register_forward_hook(lambda module, args, logits: logits * 2)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        assert isinstance(model, DistributedDataParallel)
        return policy_loss(model, batch) + model.module.mix.weight.square().mean()

    step = optimize(model, loss_fn, CONFIG)
    assert_matches_eager(step, loss_fn, model, fixed(make_batch()))
    assert fused(step)
    assert step.verify(make_batch()).ok


@pytest.mark.usefixtures("one_rank")
def test_inputs_move_to_the_wrappers_device() -> None:
    model = DistributedDataParallel(make_model())
    model.device_ids, model.device_type = [0], "meta"
    model.module.to("meta")
    assert Wrapper.of(model).inner(make_batch()["ids"]).is_meta


@pytest.mark.usefixtures("one_rank")
def test_fsdps_casts_and_hooks_of_others() -> None:
    """The policy's dtypes within the captured loss; hooks keep their order, FSDP's where it was."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.float64)
    model = fully_shard(make_model(), mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    model.register_forward_hook(lambda module, args, logits: logits * 2)
    hooks = [[*table] for table in (model._forward_pre_hooks, model._forward_hooks)]
    seen = []

    def loss_fn(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(model, FSDPModule)
        logits = model(batch["ids"])
        seen.append(logits.dtype)
        logps = token_logps(logits, batch["ids"])
        return -(logps * batch["adv"]).mean(), {"half": logps.detach().mean().half()}

    step = optimize(model, loss_fn, CONFIG)
    batch = fixed(make_batch())
    loss, metrics = step(batch)
    assert (loss.dtype, metrics["half"].dtype) == (torch.float64, torch.float16)
    assert {*seen} == {torch.float64}
    loss.backward()
    got = grads(model)
    wanted, _ = loss_fn(model, batch)
    wanted.backward()
    assert_same(loss, wanted, 1e-6)
    for name, grad in grads(model).items():
        assert_same(got[name].full_tensor(), grad.full_tensor(), 1e-6)
    assert [[*table] for table in (model._forward_pre_hooks, model._forward_hooks)] == hooks
    assert fused(step)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "with the last norm"])
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_loss_head_in_a_unit_of_its_own(grouped: bool, dtype: torch.dtype | None) -> None:
    """It is gathered for all of the step, cast as its policy says; hooks of others see it so."""
    torch._dynamo.reset()
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=dtype and torch.float64)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model, mesh = Normed(), init_device_mesh("cpu", (1,))
        unit = [model.norm, model.head] if grouped else model.head
        fully_shard(model.mix, mesh=mesh)
        fully_shard(unit, mesh=mesh, mp_policy=policy)
        models.append(fully_shard(model, mesh=mesh))
    model, twin = models
    seen = []
    model.head.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    hooks = [[*model.head._forward_pre_hooks], [*model.head._forward_hooks]]
    kind, step = type(model.head), optimize(model, policy_loss, CONFIG)
    for seed, length in ((1, 9), (2, 14), (3, 9)):
        batch = make_batch(length=length, seed=seed)
        wanted = outcome(partial(policy_loss, twin), twin, batch)
        tolerance = 1e-10 if dtype is None else 1e-5
        assert_same(whole(outcome(step, model, batch)), whole(wanted), tolerance)
    assert fused(step)
    assert not step.report.of_kind("missed")
    assert {*seen} == {dtype or torch.float64}
    assert type(model.head) is kind
    assert hooks == [[*model.head._forward_pre_hooks], [*model.head._forward_hooks]]
    assert "fuse-linear-logprob" in {r.pass_name for r in step.explain(batch).of_kind("applied")}


@pytest.mark.usefixtures("one_rank")
def test_a_table_made_of_a_buffer_is_no_loss_head() -> None:
    """As rotary embeddings': ahead of the first unit it leaves its graph, as a head's logits do."""

    class Turned(Mixer):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("angles", torch.rand(WIDTH, dtype=torch.float64))

        def forward(self, ids: Tensor) -> Tensor:
            positions = torch.arange(ids.shape[1], dtype=torch.float64)
            table = (self.angles[:, None] @ positions[None]).t().cos()
            return self.head(torch.tanh(self.mix(self.embed(ids))) * table)

    torch.manual_seed(0)
    model, mesh = Turned(), init_device_mesh("cpu", (1,))
    fully_shard(model.mix, mesh=mesh)
    step = optimize(fully_shard(model, mesh=mesh), policy_loss, CONFIG)
    for length in (9, 14):
        assert_matches_eager(step, policy_loss, model, make_batch(length=length))
    assert fused(step)
    assert not step.report.of_kind("missed")


class Layer(nn.Module):
    """Checkpoints nothing (None), what it computes, or all of its call, as transformers' did."""

    def __init__(self, checkpoints: str | None) -> None:
        super().__init__()
        self.checkpoints, self.mix = checkpoints, nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def __call__(self, hidden: Tensor) -> Tensor:
        if self.checkpoints != "call":
            return super().__call__(hidden)
        return checkpoint(super().__call__, hidden, use_reentrant=False)

    def computed(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.mix(hidden.cumsum(1) / 3))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.checkpoints != "inside":
            return self.computed(hidden)
        return checkpoint(self.computed, hidden, use_reentrant=False)


def products_kept() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


class Stack(nn.Module):
    """Layers called from a function of their own, maybe from within a checkpoint."""

    def __init__(self, checkpoints: str | None) -> None:
        super().__init__()
        self.checkpoints, self.traced = checkpoints, list[bool]()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=torch.float64)
        self.layers = nn.ModuleList(Layer(checkpoints) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        self.traced.append(torch.compiler.is_compiling())
        for layer in self.layers:
            if self.checkpoints == "outside":
                hidden = checkpoint(layer, hidden, use_reentrant=False)
            elif self.checkpoints == "method":
                hidden = partial(checkpoint, use_reentrant=False)(layer.__call__, hidden)
            elif self.checkpoints == "chosen":
                hidden = checkpoint(layer, hidden, use_reentrant=False, context_fn=products_kept)
            else:
                hidden = layer(hidden)
        return hidden


class Stacked(nn.Module):
    """A stack under a head."""

    def __init__(self, checkpoints: str | None) -> None:
        super().__init__()
        self.stack = Stack(checkpoints)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False, dtype=torch.float64)

    def shard(self, stack_too: bool = False) -> Any:
        mesh = init_device_mesh("cpu", (1,))
        for part in (*self.stack.layers, *([self.stack] if stack_too else []), self):
            fully_shard(part, mesh=mesh)
        return self

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.stack(ids))


def stacked(checkpoints: str | None, **options: bool) -> Any:
    torch.manual_seed(0)
    return Stacked(checkpoints).shard(**options)


LAYERS = replace(CONFIG, passes=("fuse-linear-logprob", "outline-layers", "recompute"))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stack_too", [False, True], ids=["layers", "stack too"])
@pytest.mark.parametrize("checkpoints", [None, "inside", "call", "outside", "method"])
def test_layers_that_fsdp_gathers_are_captured_once(
    checkpoints: str | None, stack_too: bool
) -> None:
    """One graph for four layers and any length; what calls them runs as eager code, which may look
    at values."""
    torch._dynamo.reset()
    model, twin = (stacked(checkpoints, stack_too=stack_too) for _ in range(2))
    step = optimize(model, policy_loss, LAYERS)
    for length in (9, 14, 7):
        batch = make_batch(length=length)
        wanted = outcome(partial(policy_loss, twin), twin, batch)
        assert_same(whole(outcome(step, model, batch)), whole(wanted))
    of_layers = [one for one in step.captures if "stack.layers.0" in str(one.report)]
    assert len(of_layers) == 1
    applied = {remark.pass_name for remark in of_layers[0].report.of_kind("applied")}
    assert applied == {"outline-layers", "recompute"}
    assert fused(step)
    assert captures(step) <= 4
    assert not any(model.stack.traced)
    assert type(model.stack.layers[0]) is type(twin.stack.layers[0])


@pytest.mark.usefixtures("one_rank")
def test_layers_that_fsdp_gathers_are_explained_as_they_run(tmp_path: Path) -> None:
    """Nothing is gathered for it; sizes and dtypes are those of gathered weights."""
    torch._dynamo.reset()
    model, batch = stacked("call"), make_batch(length=9)
    step = optimize(model, policy_loss, LAYERS)
    names = {name: type(weight) for name, weight in model.named_parameters()}
    told = {(r.pass_name, r.site) for r in step.explain(batch).of_kind("applied")}
    assert not step.explain(batch).of_kind("missed")
    assert {name: type(weight) for name, weight in model.named_parameters()} == names
    step(batch).backward()
    assert told == {(r.pass_name, r.site) for r in step.report.of_kind("applied")}
    step.dump(tmp_path)
    written = {path.name for path in (tmp_path / "bytecode").iterdir()}
    assert any(name.startswith("inside.0.") for name in written)
    with pytest.raises(ConfigError, match="no plan for layers that fully_shard gathers"):
        step.plan_for(batch)


@pytest.mark.usefixtures("one_rank")
def test_a_model_may_be_sharded_behind_optimize() -> None:
    """Also when the step has run."""
    torch._dynamo.reset()
    model, batch = Stacked("inside"), fixed(make_batch())
    step = optimize(model, policy_loss, LAYERS)
    step(batch)
    before = captures(step)
    model.shard()
    got = whole(outcome(step, model, batch))
    assert_same(got, whole(outcome(partial(policy_loss, model), model, batch)))
    assert fused(step)
    assert 2 <= captures(step) - before <= 3, "the layers, the head and maybe what is ahead"
    with pytest.raises(ConfigError, match="no plan"):
        step.plan_for(batch)


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_chooses_what_to_keep_runs_as_written() -> None:
    """Around a layer that FSDP gathers: it sees each op, so nothing is captured in it."""
    torch._dynamo.reset()
    model, twin = stacked("chosen"), stacked("chosen")
    step, batch = optimize(model, policy_loss, LAYERS), fixed(make_batch())
    for _ in range(2):
        wanted = outcome(partial(policy_loss, twin), twin, batch)
        assert_same(whole(outcome(step, model, batch)), whole(wanted))
    assert fused(step)
    (told,) = (r for r in step.report.of_kind("analysis") if "runs as written" in r.reason)
    assert "without a context_fn" in told.cure


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("side", ["ahead", "behind"])
def test_hooks_around_those_of_fsdp_keep_their_order(side: str) -> None:
    """One ahead of the gathering sees no weights of its module's; one behind sees them freed."""
    torch._dynamo.reset()
    model, seen = stacked(None), []
    layer = model.stack.layers[1]

    def look(module: Layer, *_: Any) -> None:
        seen.append(type(module.mix.weight).__name__)

    if side == "ahead":
        layer.register_forward_pre_hook(look, prepend=True)
    else:
        layer.register_forward_hook(look)
    step, batch = optimize(model, policy_loss, LAYERS), fixed(make_batch())
    got = whole(outcome(step, model, batch))
    assert_same(got, whole(outcome(partial(policy_loss, model), model, batch)))
    assert {*seen} == {"DTensor"}
    assert fused(step)


def whole(found: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss, and gradients that are no parts."""
    loss, found_grads = found
    return loss, {name: grad.full_tensor() for name, grad in found_grads.items()}


class Apart(Mixer):
    """Its head is not tied: two units can have no weight in common."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = nn.Parameter(self.embed.weight.detach().clone())


class Normed(Apart):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        hidden = hidden + torch.tanh(self.mix(hidden.cumsum(1) / 3))
        return self.head(self.norm(hidden))


def two_devices() -> nn.Module:
    model = DataParallel(make_model())
    model.device_ids = [0, 1]
    return model


def flattened(model: nn.Module | None = None) -> nn.Module:
    return FullyShardedDataParallel(model or make_model(), device_id=torch.device("cpu"))


def tensor_parallel() -> nn.Module:
    mesh = init_device_mesh("cpu", (1,))
    return parallelize_module(make_model(), mesh, {"mix": ColwiseParallel()})


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(False)


def flattened_frozen() -> nn.Module:
    return flattened(frozen(make_model()))


def replicated() -> nn.Module:
    from torch.distributed._composable import replicate

    return replicate(make_model())


def partitioned() -> nn.Module:
    """As ``deepspeed.zero.Init`` leaves a model."""
    model = frozen(make_model())
    for number, parameter in enumerate(model.parameters()):
        parameter.ds_id = number  # type: ignore[attr-defined]
    return model


def nested() -> nn.Module:
    return nn.Sequential(DistributedDataParallel(make_model()))


@pytest.mark.parametrize(
    ("make", "words", "cure"),
    [
        (two_devices, "DataParallel copies", "one process for each device"),
        (flattened, "FSDP gathers", "DistributedDataParallel"),
        (flattened, "FSDP gathers", "ZeroRedundancyOptimizer"),
        (flattened_frozen, "FSDP gathers", "fxrl.models.shard"),
        (tensor_parallel, "it is a DTensor", "give each rank a whole model"),
        (partitioned, "ZeRO 3 holds a part", "fxrl.models.shard"),
        (replicated, "replicate readies", "DistributedDataParallel instead"),
        (nested, "DistributedDataParallel: its forward", "wrap all of the model"),
    ],
    ids=[
        "data parallel",
        "fsdp1",
        "fsdp1, trained",
        "fsdp1, frozen",
        "tensor parallel",
        "zero 3",
        "replicate",
        "ddp inside",
    ],
)
@pytest.mark.usefixtures("one_rank")
def test_a_closed_wrapper_is_a_miss_with_its_name_and_cure(make, words, cure) -> None:
    model = make()
    with pytest.raises(MissedRewriteError, match=words):
        optimize(model, policy_loss, CONFIG)
    with pytest.warns(MissedRewriteWarning, match=words):
        optimize(model, policy_loss, Config())
    (remark,) = optimize(model, policy_loss, QUIET).report.of_kind("missed")
    assert words in remark.reason
    assert cure in remark.cure


def test_deepspeeds_engine_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    class DeepSpeedEngine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = make_model()

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    library = types.ModuleType("deepspeed")
    library.DeepSpeedEngine = DeepSpeedEngine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deepspeed", library)
    (remark,) = Wrapper.of(DeepSpeedEngine()).report.of_kind("missed")
    assert "DeepSpeed's engine" in remark.reason
    assert "a whole model" in remark.cure


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    "make", [flattened, nested, replicated], ids=["fsdp1", "ddp inside", "replicate"]
)
def test_the_numbers_of_a_closed_wrapper_are_eagers(make) -> None:
    torch._dynamo.reset()
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_matches_eager(
            optimize(model, policy_loss, QUIET), policy_loss, model, fixed(make_batch())
        )


@pytest.mark.usefixtures("one_rank")
def test_what_a_closed_wrapper_breaks_has_no_cure_but_the_wrappers() -> None:
    """No line of the loss can be moved, and no value returned, that would bring the head back."""
    torch._dynamo.reset()
    step = optimize(nested(), policy_loss, QUIET)
    step(fixed(make_batch()))
    wrapper, *others = step.report.of_kind("missed")
    assert "DistributedDataParallel" in wrapper.cure or "DDP" in wrapper.cure
    assert {r.pass_name for r in others} >= {"capture", "fuse-linear-logprob"}
    assert not any(remark.cure for remark in others), others


def compiled(model: nn.Module) -> nn.Module:
    """By a backend that needs no compiler: the step does not use it, and eager is what it gives."""
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("wrap", [compiled, DataParallel], ids=["compiled", "one device"])
def test_an_open_wrapper_keeps_the_rewrite(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    with monkeypatch.context() as where:
        where.setattr(torch.cuda, "is_available", lambda: False)  # DataParallel moves to GPUs
        model = wrap(make_model())
    step = optimize(model, policy_loss, CONFIG)
    assert_matches_eager(step, policy_loss, model, fixed(make_batch()))
    assert fused(step)
