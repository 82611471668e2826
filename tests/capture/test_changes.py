"""What changes between two calls of a step is honoured by the next one: hooks, modes, modules."""

from __future__ import annotations

import copy
import functools
import math
import os
import pickle
import sys
import types
from abc import ABC
from collections import ChainMap, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config

from fxrl.errors import FxrlError
from fxrl.step import TrainStep, optimize
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
from tests.rows import rows as seldom_run

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


HOOKS: dict[str, Callable[[Mixer], Any]] = {
    "forward": lambda m: m.mix.register_forward_hook(lambda _, args, out: out * 2),
    "forward of the model": lambda m: m.register_forward_hook(lambda _, args, out: out * 2),
    "forward pre": lambda m: m.mix.register_forward_pre_hook(lambda _, args: (args[0] + 1,)),
    "backward": lambda m: m.mix.register_full_backward_hook(lambda _, gi, go: (gi[0] * 3,)),
    "backward pre": lambda m: m.mix.register_full_backward_pre_hook(lambda _, go: (go[0] * 3,)),
    "tensor": lambda m: m.mix.weight.register_hook(lambda grad: grad * 2),
    "of all modules": lambda m: nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if module is m.mix else None
    ),
}


#: Of these the forward's own, and the backward's other one, are the kind.
SELDOM = ("forward of the model", "forward pre", "backward")


@pytest.mark.parametrize("name", seldom_run(HOOKS, SELDOM))
def test_a_hook_that_comes_and_goes(name: str) -> None:
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, QUIET)  # backward hooks end the graph, and it is told
    assert_matches_eager(step, policy_loss, model, batch)
    before = step(batch).item()
    hook = HOOKS[name](model)
    try:
        assert_matches_eager(step, policy_loss, model, batch)
    finally:
        hook.remove()
    assert_matches_eager(step, policy_loss, model, batch)
    assert step(batch).item() == before
    assert fused(step)


def swap(model: Mixer) -> None:
    model.mix = nn.Sequential(nn.Linear(12, 12, dtype=torch.float64), nn.Tanh())


CHANGES: dict[str, Callable[[Mixer], Any]] = {
    "eval": lambda m: m.eval(),
    "frozen": lambda m: m.mix.weight.requires_grad_(False),
    "another parameter": lambda m: setattr(m.mix, "weight", nn.Parameter(m.mix.weight * 2)),
    "another module": swap,
    "swapped for another": lambda m: torch.utils.swap_tensors(
        m.embed.weight, nn.Parameter(m.embed.weight.detach() * 2)
    ),
    "untied": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
}


class Held:
    weight: torch.Tensor

    @functools.cached_property
    def number(self) -> float:
        return 5.0


def loss_with_held(model: Mixer, batch: Any) -> torch.Tensor:
    tied = model.head.weight is model.embed.weight
    return policy_loss(model, batch) * (2 if tied else 1) + (Held.weight * model.mix.weight).sum()


def test_a_weight_by_another_name_may_become_another() -> None:
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    step = optimize(model, loss_with_held, CONFIG)
    CHANGES["untied"](model)
    for Held.weight in (model.mix.weight, torch.ones(12, 12, dtype=torch.float64)):
        assert_matches_eager(step, loss_with_held, model, batch)
    model.head.weight = model.embed.weight
    assert_matches_eager(step, loss_with_held, model, batch)
    assert captures(step) == 3


@pytest.mark.parametrize("take", [lambda *args: F.cross_entropy(*args), nn.CrossEntropyLoss])
def test_what_stands_for_a_function_of_torch_is_applied_once(monkeypatch: Any, take: Any) -> None:
    def loss(model: Mixer, batch: Any) -> torch.Tensor:
        logits = model(batch["ids"])[:, :-1]
        loss_of = take() if isinstance(take, type) else take
        return loss_of(logits.flatten(0, 1), batch["ids"][:, 1:].flatten())

    def scaled(by: float) -> Callable[..., torch.Tensor]:
        return lambda z, *args, **options: own(z * by, *args, **options)

    model, batch, own = make_model(), fixed(make_batch()), F.cross_entropy
    step = optimize(model, loss, CONFIG)
    for by in (0.5, 2.0):
        monkeypatch.setattr(F, "cross_entropy", scaled(by))
        assert_matches_eager(step, loss, model, batch)
    assert fused(step)


def methods_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return policy_loss(model, batch).exp() * batch["mask"].sum()


@pytest.mark.parametrize("name", ["sum", "exp", "gather", "__mul__"])
def test_a_method_of_tensors_that_the_user_replaces_is_called(monkeypatch: Any, name: str) -> None:
    model, batch, own = make_model(), fixed(make_batch()), getattr(torch.Tensor, name)
    step = optimize(model, methods_loss, QUIET)
    assert_matches_eager(step, methods_loss, model, batch)
    for by in (2.0, 3.0):
        with monkeypatch.context() as replaced:
            replaced.setattr(
                torch.Tensor, name, lambda x, *args, by=by: torch.mul(own(x, *args), by)
            )
            assert_matches_eager(step, methods_loss, model, batch)
    assert f"torch.Tensor.{name} is not torch's own" in step.report.of_kind("missed")[0].reason
    before = captures(step)
    assert_matches_eager(step, methods_loss, model, batch)
    assert captures(step) == before == 1


def test_a_function_that_one_of_torch_calls_may_become_another(monkeypatch: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        logits = model(batch["ids"])
        return F.layer_norm(logits, logits.shape[-1:]).square().max()

    model, batch, own = make_model(), fixed(make_batch()), torch.layer_norm
    step = optimize(model, loss, QUIET)
    for by in (1.0, 2.0):
        monkeypatch.setattr(torch, "layer_norm", lambda *args, by=by: own(*args) * by)
        assert_matches_eager(step, loss, model, batch)


class Key:
    """Equals another of its value, which Python asks it."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


def written_and_read() -> float:
    """A number by both of its names, before and behind what a step writes."""
    first = settings.n_embd * settings.hidden_size
    settings.hidden_size = settings.n_embd + 1
    second = settings.n_embd * settings.hidden_size
    settings.n_embd = settings.hidden_size - 1
    return float(first + 10 * second)


def later() -> float:
    try:
        return made.added
    except AttributeError:
        return 2.0


class Base:
    factor = 1.0


settings = GPT2Config(n_embd=2)


class Derived(Base):
    zero = 0.0
    order = OrderedDict(a=1.0, b=2.0)
    key = Key(0)
    added: float

    def method(self) -> float:
        return 1.0


class Making:
    def __getattr__(self, name: str) -> float:
        return 2.0


class Kind(ABC):  # noqa: B024  # it is asked for what was registered alone
    pass


made = Derived()
making = Making()
numbers = ChainMap({}, {"a": 2.0})

STATES: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "an order": (
        lambda: next(iter(Derived.order.values())),
        lambda: Derived.order.move_to_end("a"),
    ),
    "a key": (lambda: {Key(3): 2.0}.get(Derived.key, 1.0), lambda: setattr(Derived, "key", Key(3))),
    "a key that was missing": (
        lambda: numbers["a"],
        lambda: numbers.__setitem__("a", 3.0),
    ),
    "an attribute that was missing": (later, lambda: setattr(made, "added", 4.0)),
    "an environment": (
        lambda: float(os.getenv("FXRL_TESTED", "2")),
        lambda: os.environ.__setitem__("FXRL_TESTED", "7"),
    ),
    "a configuration": (written_and_read, lambda: setattr(settings, "n_embd", 5)),
    "a method": (
        lambda: Derived().method() * made.method(),
        lambda: setattr(Derived, "method", lambda _: 3.0),
    ),
    "an attribute that is made": (
        lambda: making.any,
        lambda: setattr(Making, "__getattr__", lambda *_: 3.0),
    ),
    "an instance of what is registered": (
        lambda: 2.0 if isinstance(making, Kind) else 1.0,
        lambda: Kind.register(Making),
    ),
    "a class that is registered": (
        lambda: 2.0 if issubclass(Derived, (int, Kind)) else 1.0,
        lambda: Kind.register(Derived),
    ),
    "a class's own": (lambda: Derived().factor, lambda: setattr(Derived, "factor", 5.0)),
}
if torch.__version__ >= "2.13":  # to torch 2.11's guards zero and minus zero are one
    STATES["a sign of zero"] = (
        lambda: math.copysign(1.0, Derived.zero),
        lambda: setattr(Derived, "zero", -0.0),
    )


def test_what_python_holds_may_change(monkeypatch: Any) -> None:
    monkeypatch.setenv("FXRL_TESTED", "2")
    monkeypatch.delenv("FXRL_TESTED")  # which is undone

    def loss(model: Mixer, batch: Any) -> torch.Tensor:
        loss = policy_loss(model, batch)
        for read, _ in STATES.values():
            loss = loss * read()
        return loss

    model, batch = make_model(dropout=0.0), fixed(make_batch())
    step = optimize(model, loss, CONFIG)
    assert_matches_eager(step, loss, model, batch)
    for read, change in STATES.values():
        before = read()
        change()
        assert read() != before
        assert_matches_eager(step, loss, model, batch)
    assert fused(step)


scale = 1.0


class Caching:
    """Functions that are asked once; one forgets what it said for another argument."""

    def __init__(self) -> None:
        self.width = 2.0
        self.of_number = functools.cache(lambda n: n * scale)
        self.of_one = functools.lru_cache(maxsize=1)(lambda n: n * scale)
        self.tensor = functools.cache(lambda: torch.tensor(scale, dtype=torch.float64))
        self.seen = functools.cache(lambda: [scale])

    @functools.cache  # noqa: B019
    def method(self) -> float:
        return self.width * scale


class Slotted:
    """Has no dictionary of its own."""

    __slots__ = ("width",)

    @functools.cache  # noqa: B019
    def twice(self) -> float:
        return 2 * self.width


SLOTTED = Slotted()
SLOTTED.width = 1.5


def caching_loss(model: nn.Module, batch: Any, said: Caching) -> torch.Tensor:
    said.seen().append(2.0)
    numbers = said.of_number(2) + said.of_number(n=3) + said.method() + len(said.seen())
    numbers = numbers + SLOTTED.twice()
    return policy_loss(model, batch) * said.tensor() * numbers * said.of_one(2) * said.of_one(3)


SOURCE = """
from tests.capture.mixer import policy_loss
KEPT, SCALE, calls = [], 2.0, 0

def counted(loss):
    global calls
    calls += 1
    KEPT.append(float(calls))
    return loss * SCALE

def loss_fn(model, batch):
    return counted(policy_loss(model, batch))
"""


@pytest.mark.parametrize("registered", ["none", "another", "another since"])
def test_globals_of_a_module_that_its_name_does_not_find(registered: str, monkeypatch: Any) -> None:
    """A file that was loaded without ``sys.modules``, or twice under one name."""

    def loaded() -> types.ModuleType:
        module = types.ModuleType("losses_of_mine")
        exec(SOURCE, vars(module))
        return module

    if registered == "another":
        monkeypatch.setitem(sys.modules, "losses_of_mine", loaded())
    mine, model = loaded(), make_model()
    step = optimize(model, mine.loss_fn, CONFIG)
    for turn in (1, 2):
        batch = fixed(make_batch(seed=turn))
        assert_same(step(batch), policy_loss(model, batch) * mine.SCALE)
        assert (mine.calls, mine.KEPT[-1]) == (turn, turn)
        mine.SCALE *= 3
        if registered == "another since":
            monkeypatch.setitem(sys.modules, "losses_of_mine", loaded())
    assert fused(step)


def test_a_cache_says_what_it_has(monkeypatch: Any) -> None:
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    said, wanted = Caching(), Caching()
    step = optimize(model, partial(caching_loss, said=said), CONFIG)
    for number in (1.0, 2.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "scale", number)
        if number == 3.0:
            for one in (said, wanted):
                one.of_number.cache_clear()
                one.tensor.cache_clear()
        assert_same(step(batch), caching_loss(model, batch, wanted))
    assert fused(step)


class Tables:
    """Caches that are asked by sizes that vary, and by a weight."""

    def __init__(self) -> None:
        self.base = 1.0
        self.drawn = functools.cache(lambda n: torch.rand(n, dtype=torch.float64))
        self.norm = functools.cache(lambda w: w.detach().norm() * self.base)

    @functools.cache  # noqa: B019
    def table(self, n: int) -> torch.Tensor:
        return torch.arange(n, dtype=torch.float64) * self.base * scale


def tabled(model: nn.Module, batch: Any, tables: Tables) -> torch.Tensor:
    logps = token_logps(model(batch["ids"]), batch["ids"]) * tables.table(n=batch["mask"].size(1))
    return -(logps * batch["adv"]).mean() * tables.norm(model.mix.weight)


def drawing(model: nn.Module, batch: Any, tables: Tables) -> torch.Tensor:
    logps = token_logps(model(batch["ids"]), batch["ids"]) * tables.drawn(batch["mask"].size(1))
    return -(logps * batch["adv"]).mean()


def writing(model: nn.Module, batch: Any, tables: Tables) -> torch.Tensor:
    tables.base += 1
    return tabled(model, batch, tables)


@pytest.mark.parametrize("loss_fn", [tabled, drawing, writing])
def test_a_cache_keeps_what_it_said_of_a_size_that_varies(loss_fn: Any, monkeypatch: Any) -> None:
    model, tables, wanted = make_model(dropout=0.0), Tables(), Tables()
    step = optimize(model, partial(loss_fn, tables=tables), CONFIG)
    for number, length in enumerate((7, 9, 8, 7, 9, 8, 7)):
        batch, made = make_batch(length=length), []
        if number == 3:
            monkeypatch.setattr(sys.modules[__name__], "scale", 2.0)
        with torch.no_grad():
            model.mix.weight.mul_(1.1)
        for one in (step, partial(loss_fn, model, tables=wanted)):
            torch.manual_seed(number)
            made.append(outcome(one, model, batch))
        assert_same(*made)
        assert loss_fn is not tabled or number > 2 or captures(step) == 1
    assert fused(step)


class Ticking(nn.Module):
    """A layer that asks caches: of a length, of itself, of a weight."""

    def __init__(self, tables: Tables, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.tables, self.number = tables, number

    @functools.cache  # noqa: B019
    def slope(self) -> float:
        return 0.5**self.number

    def asked(self, x: torch.Tensor, of: str) -> Any:
        if of == "length":
            return self.tables.table(n=x.size(1))[:, None]
        return self.slope() if of == "itself" else self.tables.norm(self.linear.weight)

    def forward(self, x: torch.Tensor, of: str) -> torch.Tensor:
        return x + torch.tanh(self.linear(x.cumsum(1) / 3)) * self.asked(x, of)


class Layered(nn.Module):
    def __init__(self, of: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.of, self.tables = nn.Embedding(VOCAB, WIDTH).double(), of, Tables()
        self.layers = nn.ModuleList(Ticking(self.tables, number) for number in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.of == "checkpointed":
                x = checkpoint(layer, x, "length", use_reentrant=False)
            else:
                x = layer(x, self.of)
        return x @ self.embed.weight.T


@pytest.mark.parametrize(
    "of", ["length", "checkpointed", "itself", pytest.param("weight", marks=pytest.mark.slow)]
)
def test_a_cache_that_layers_ask_keeps_what_it_said(of: str) -> None:
    model, wanted = Layered(of), Layered(of)
    step = optimize(model, policy_loss, QUIET)
    for number, length in enumerate((7, 9, 7, 9)):
        model.tables.base = wanted.tables.base = max(1.0, number)
        made = []
        for one, of_model in ((step, model), (partial(policy_loss, wanted), wanted)):
            made.append(outcome(one, of_model, make_batch(length=length)))
        assert_same(*made)
    assert of in ("length", "checkpointed") or captures(step) == 1


def test_what_a_cache_says_of_what_is_known_is_captured_once(monkeypatch: Any) -> None:
    said = functools.cache(lambda n: n * scale)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return policy_loss(model, batch) * said(2)

    model, batch = make_model(dropout=0.0), fixed(make_batch())
    step = optimize(model, loss, CONFIG)
    for number in (1.0, 2.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "scale", number)
        assert_matches_eager(step, loss, model, batch)
    assert captures(step) == 1


heat: ContextVar[float] = ContextVar("heat", default=1.0)
cooled: ContextVar[float] = ContextVar("cooled")


def heated(model: nn.Module, batch: Any) -> torch.Tensor:
    logits = model(batch["ids"]) / heat.get() * cooled.get(0.5)
    return -token_logps(logits, batch["ids"]).mean()


def test_a_context_variable_is_read_as_the_graph_runs() -> None:
    def run() -> None:
        model, batch = make_model(dropout=0.0), fixed(make_batch())
        step = optimize(model, heated, CONFIG)
        for number in (1.0, 0.9, 0.8, 0.7):
            heat.set(number)
            assert_matches_eager(step, heated, model, batch)
        assert captures(step) == 2
        for number in (0.4, 0.3, 0.2):
            cooled.set(number)
            assert_matches_eager(step, heated, model, batch)
        assert fused(step)

    copy_context().run(run)


Kept = defaultdict[str, list[Any]]
rows: list[int] = []


def keeps(model: nn.Module, batch: Any, kept: Kept) -> torch.Tensor:
    global rows
    loss = policy_loss(model, batch)
    rows += [len(batch["ids"])]
    kept["newest"].insert(0, loss.detach())
    kept["loss"].append(loss.item())
    kept["pair"].append((loss.item(), len(batch["ids"])))
    kept["row"].append(row := {"loss": loss.detach()})
    row["twice"] = 2 * loss.item()
    kept["both"].extend((loss.item(), 1))
    kept["tokens"] = [batch["ids"].numel()]
    return loss


def keeps_and_reads(model: nn.Module, batch: Any, kept: Kept) -> torch.Tensor:
    loss, same = policy_loss(model, batch), kept["same"]
    kept["loss"].append(loss.item())
    kept["loss"].extend([1.0])
    return loss * (kept["loss"][-2] + len(same))


@pytest.mark.parametrize(
    ("loss_fn", "made"), [(keeps, 2), pytest.param(keeps_and_reads, 4, marks=pytest.mark.slow)]
)
def test_a_list_that_grows_is_not_looked_into_unless_it_is_read(loss_fn: Any, made: int) -> None:
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    kept, wanted = (defaultdict(list, same=same, loss=same) for same in ([], []))
    step = optimize(model, partial(loss_fn, kept=kept), CONFIG)
    for _ in range(4):
        assert_same(step(batch), loss_fn(model, batch, wanted))
    assert_same([*kept.values()], [*wanted.values()])
    assert len(rows) == (8 if loss_fn is keeps else 0)
    rows.clear()
    assert fused(step)
    assert captures(step) == made


class Mean:
    """Of all losses so far."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def of_losses(self) -> float:
        return sum(self.losses) / len(self.losses) if self.losses else 0.0


def below_the_mean(model: nn.Module, batch: Any, so_far: Mean) -> torch.Tensor:
    loss = policy_loss(model, batch)
    so_far.losses.append(loss.item())
    return loss - so_far.of_losses()


def told_the_mean(model: nn.Module, batch: Any, so_far: Mean) -> torch.Tensor:
    mean = so_far.of_losses()
    loss = policy_loss(model, batch)
    so_far.losses.append(loss.item())
    return loss * mean


def told_the_number(model: nn.Module, batch: Any, so_far: Mean) -> torch.Tensor:
    return policy_loss(model, batch) / (1 + len(so_far.losses))


@pytest.mark.parametrize(
    "loss_fn",
    [
        below_the_mean,
        pytest.param(told_the_mean, marks=pytest.mark.slow),
        pytest.param(told_the_number, marks=pytest.mark.slow),
    ],
)
def test_a_list_that_is_ever_longer_is_read_by_python(loss_fn: Any) -> None:
    """Captured for each length that it has, the step would be captured anew at each call."""
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    so_far, wanted = Mean(), Mean()
    step = optimize(model, partial(loss_fn, so_far=so_far), CONFIG)
    made = []
    for number in range(9):
        assert_matches_eager(step, partial(loss_fn, so_far=wanted), model, batch)
        made.append(captures(step))
        for one in (so_far, wanted) if loss_fn is told_the_number else ():
            one.losses.append(number)
    assert so_far.losses == pytest.approx(wanted.losses)
    assert made[-1] == made[-3]
    assert fused(step)


class Recent(nn.Module):
    """Compares a loss with the last ones; more are forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: deque[torch.Tensor] = deque(maxlen=2)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = policy_loss(model, batch)
        self.losses.append(loss.detach() * batch["scale"])
        return loss * torch.stack(list(self.losses)).mean()

    def all(self) -> list[Any]:
        return list(self.losses)


def test_a_deque_forgets_what_is_too_much() -> None:
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    loss, wanted = Recent(), Recent()
    step = optimize(model, loss, CONFIG)
    for number in range(5):
        batch["scale"] = torch.tensor(number + 1.0, dtype=torch.float64)
        if number == 4:
            loss.losses, wanted.losses = (deque(wanted.losses, maxlen=5) for _ in range(2))
        result = outcome(step, model, batch)
        assert_same(result, outcome(partial(wanted, model), model, batch))
        assert_same(loss.all(), wanted.all())
    assert captures(step) == 4


class Growing(nn.Module):
    """Lists of its own, of a dict and of a closure grow, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []
        self.kept: dict[str, list[Any]] = {"loss": []}
        self.add, self.added = growing()

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = policy_loss(model, batch)
        self.losses += [loss.detach(), 1.0]
        self.kept["loss"] += [loss.item()]
        self.add(loss.item())
        return loss

    def all(self) -> list[Any]:
        return [self.losses, self.kept["loss"], self.added()]


def growing() -> tuple[Callable[[float], None], Callable[[], list[float]]]:
    added: list[float] = []

    def add(loss: float) -> None:
        nonlocal added
        added += [loss]

    return add, lambda: added


class GrowingAndReading(Growing):
    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().forward(model, batch)
        return loss * len(self.losses) + self.losses[-2]


class Counting(nn.Module):
    """Counts its calls, what its batches hold and what its loss was on average."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.average, self.counts = 0, 1.0, defaultdict(int, rows=0)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.calls += 1
        self.counts["rows"] += len(batch["ids"])
        loss = policy_loss(model, batch)
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss * (1 + self.calls / 10) / self.average

    def all(self) -> list[Any]:
        return [self.calls, self.average, dict(self.counts)]


class Computing(nn.Module):
    """Computes what it needs at its first call, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.made = Held(), 0

    @functools.cached_property
    def scale(self) -> float:
        self.made = 1
        return 3.0

    @functools.cached_property
    def offset(self) -> torch.Tensor:
        return torch.tensor(2.0, dtype=torch.float64)

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = policy_loss(model, batch) * self.scale + self.offset
        return loss * self.scale * self.held.number

    def all(self) -> list[Any]:
        assert {"scale", "offset"} < vars(self).keys()
        assert vars(self.held) == {"number": 5.0}
        return [self.made, self.offset]


@pytest.mark.parametrize(
    ("kind", "made"), [(Growing, 1), (GrowingAndReading, 5), (Counting, 2), (Computing, 2)]
)
def test_what_a_module_keeps_for_later_calls(kind: Any, made: int) -> None:
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    loss, wanted = kind(), kind()
    step = optimize(model, loss, CONFIG)
    for _ in range(4):
        result = outcome(step, model, batch)
        assert_same(result, outcome(partial(wanted, model), model, batch))
        assert_same(loss.all(), wanted.all())
    assert fused(step)
    assert captures(step) == made


def test_the_model_may_change() -> None:
    model, batch = make_model(dropout=0.0), fixed(make_batch())
    step = optimize(model, policy_loss, CONFIG)
    for change in (lambda m: None, *CHANGES.values()):
        change(model)
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)


def test_a_weight_may_be_resized_while_it_has_a_gradient() -> None:
    """As transformers resizes an embedding; the gradient is left out behind the next forward."""
    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, policy_loss, CONFIG)
    step(batch).backward()
    for weight in {model.embed.weight, model.head.weight}:
        weight.data = torch.cat([weight.data, weight.data[:2]])
    found = step(batch)
    model.zero_grad(set_to_none=True)
    found.backward()
    got = grads(model)
    policy_loss(model, batch).backward()
    assert_same(got, grads(model))


# ------------------------------------------------------------------------------------- copies
class Scaled(nn.Module):
    """A loss with state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return policy_loss(model, batch) * self.scale


def pickled(step: TrainStep) -> TrainStep:
    other: TrainStep = pickle.loads(pickle.dumps(step))
    return other


@pytest.mark.parametrize(
    "make_copy", [pytest.param(copy.deepcopy, marks=pytest.mark.slow), pickled]
)
def test_a_copy_evaluates_the_copied_model_and_loss(make_copy) -> None:
    batch, loss_fn = fixed(make_batch()), Scaled()
    step = optimize(make_model(), loss_fn, CONFIG)
    value = step(batch).detach()
    other = make_copy(step)
    with torch.no_grad():
        other.model.mix.weight.mul_(3)
        other.loss_fn.scale.mul_(5)
    assert_matches_eager(other, other.loss_fn, other.model, batch)
    assert fused(other)
    assert other.config == step.config
    assert_same(step(batch).detach(), value)
    assert captures(step) == 1


def test_a_shallow_copy_shares_the_model() -> None:
    step = optimize(make_model(), policy_loss, CONFIG)
    assert copy.copy(step).model is step.model
    with pytest.raises(AttributeError):
        step.model = make_model()  # the captured code would go on with the first one


def test_a_loss_that_cannot_be_pickled_is_named_with_a_cure() -> None:
    step = optimize(make_model(), lambda model, batch: policy_loss(model, batch), CONFIG)
    with pytest.raises(FxrlError, match=r"loss function cannot: .*<lambda>.*top level of a module"):
        pickle.dumps(step)
    assert copy.deepcopy(step).model is not step.model
