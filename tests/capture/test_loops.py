"""A graph that ends within a loop: what is left of the loop is as lazy as Python's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxrl.step import optimize
from tests.capture.mixer import (
    QUIET,
    VOCAB,
    assert_matches_eager,
    assert_same,
    captures,
    fixed,
    fused,
    make_batch,
    make_model,
    outcome,
    policy_loss,
    token_logps,
)

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def ended(x: Any) -> Any:
    torch._dynamo.graph_break()
    return x


class Layered(nn.Module):
    """Its head is behind a loop over layers, in the function that calls the loop's."""

    def __init__(self, loop: Callable[[Layered, Tensor], Tensor] | None, depth: int = 4) -> None:
        super().__init__()
        self.loop = loop
        self.embed = nn.Embedding(VOCAB, 8, dtype=torch.float64)
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.float64) for _ in range(depth))
        self.head = nn.Linear(8, VOCAB, bias=False, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.loop(self, self.embed(ids)))
        return logits


def by_number(self: Layered, x: Tensor) -> Tensor:
    for number in range(len(self.layers)):
        x = ended(x + self.layers[number](x).tanh())
    return x


def backwards(self: Layered, x: Tensor) -> Tensor:
    for layer in reversed(self.layers):
        x = ended(x + layer(x).tanh())
    return x


def uncounted(self: Layered, x: Tensor) -> Tensor:
    done = 0
    while done < len(self.layers):
        x = ended(x + self.layers[done](x).tanh())
        done += 1
    return x


def zipped_with_numbers(self: Layered, x: Tensor) -> Tensor:
    for number, layer in zip(range(9), self.layers, strict=False):
        x = ended(x + number * layer(x).tanh())
    return x


def summed(self: Layered, x: Tensor) -> Tensor:
    """A generator that has not begun when the graph ends at its sum."""
    return sum((ended(layer(x)) for layer in self.layers), x)


def as_pairs(self: Layered, x: Tensor) -> Tensor:
    left = iter(self.layers)
    for first, second in zip(left, left, strict=False):
        x = ended(x + first(x).tanh() - second(x).tanh())
    return x


def two_at_once(self: Layered, x: Tensor) -> Tensor:
    left = iter(self.layers)
    for number, layer in enumerate(left):
        x = ended(x + number * layer(x).tanh() - next(left)(x).tanh())
    return x


def that_grow(self: Layered, x: Tensor) -> Tensor:
    left = list(self.layers[:2])
    for number, layer in enumerate(left):
        x = ended(x + layer(x).tanh())
        if number < 2:
            left.append(self.layers[3])
    return x


def that_are_exchanged(self: Layered, x: Tensor) -> Tensor:
    left = dict(enumerate(self.layers))
    for layer in left.values():
        x = ended(x + layer(x).tanh())
        left[2] = self.layers[0]
    return x


@pytest.mark.parametrize(
    "loop",
    [
        by_number,
        pytest.param(backwards, marks=pytest.mark.slow),
        uncounted,
        pytest.param(zipped_with_numbers, marks=pytest.mark.slow),
        summed,
        as_pairs,
        two_at_once,
        that_grow,
        that_are_exchanged,
    ],
)
def test_a_head_behind_a_loop_over_layers_in_its_function(loop: Any) -> None:
    torch.manual_seed(0)
    model = Layered(loop)
    step = optimize(model, policy_loss, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)


class Flat(Layered):
    """Its loop and its head are in one function."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = ended(x + layer(x).tanh())
        logits: Tensor = self.head(x)
        return logits


def in_one_layer(self: Layered, x: Tensor) -> Tensor:
    for number, layer in enumerate(self.layers):
        x = x + layer(x).tanh()
        if number == 3:
            x = ended(x)
    return x


@pytest.mark.parametrize(
    ("make", "most"),
    [
        (partial(Flat, None), 9),
        (partial(Layered, by_number), 4),
        (partial(Layered, in_one_layer), 2),
    ],
    ids=["the head in its function", "ahead of the head", "one end"],
)
def test_how_many_graphs_end_in_a_loop_over_layers(make: Any, most: int) -> None:
    """As many as the loss head needs; where it is behind the loop's function, no more than a few:
    each turn that a graph ends in is a capture of its own."""
    torch.manual_seed(0)
    model = make(depth=8)
    step = optimize(model, policy_loss, QUIET)
    batch = fixed(make_batch())
    for _ in range(2):
        assert_matches_eager(step, policy_loss, model, batch)
    assert fused(step)
    assert captures(step) <= most


def by_rows(model: nn.Module, batch: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for number, ids in enumerate(ended(batch["ids"]).split(1), 1):
        total = ended(total) - number * token_logps(model(ids), ids).mean()
    return total


def until_it_is_large(model: nn.Module, batch: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    while total < 12:
        total = total + ended(policy_loss(model, batch)).abs() + 5
    return total


def behind_names(model: nn.Module, batch: Any) -> Tensor:
    found = {}
    for name, value in batch.items():
        found[name] = ended(value).sum()
    return policy_loss(model, batch) * found["mask"]


def behind_a_dictionary(model: nn.Module, batch: Any) -> Tensor:
    found = {number: ended(row).tanh() for number, row in enumerate(batch["adv"], 2)}
    return policy_loss(model, batch) * sum(found.values()).sum()


@pytest.mark.parametrize("loss_fn", [by_rows, until_it_is_large, behind_names, behind_a_dictionary])
def test_a_head_in_a_loss_that_loops(loss_fn: Any) -> None:
    model = make_model()
    step = optimize(model, loss_fn, QUIET)
    for batch in (make_batch(), make_batch(2, 9, seed=2)):
        assert_matches_eager(step, loss_fn, model, batch)
    assert fused(step)


def test_a_loop_of_many_turns_is_left_to_python() -> None:
    """No graph ends in it, each turn would be captured; where nobody can count turns, some are."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = policy_loss(model, batch)
        for number in range(40):
            value = ended(value) + number
        left = 40
        while left:
            value, left = ended(value) * 0.99, left - 1
        return value

    model, batch = make_model(), fixed(make_batch())
    step = optimize(model, loss, QUIET)
    for _ in range(2):
        assert_matches_eager(step, loss, model, batch)
    assert fused(step)
    assert captures(step) < 40


def test_a_function_that_loops_over_texts_is_left_to_python() -> None:
    """It names no layer that would be left out with it, and its turns are other ones each time."""

    def longest(texts: list[str]) -> int:
        most = 0
        for text in texts:
            most = max(most, len(ended(text)))
        return most

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return policy_loss(model, batch) + longest(batch["texts"])

    model = make_model()
    step = optimize(model, loss, QUIET)
    for seed in range(6):
        texts = [f"{seed}{row}" * (row + seed) for row in range(3)]
        assert_matches_eager(step, loss, model, fixed(make_batch(texts=texts)))
    assert fused(step)
    assert captures(step) <= 3


class Held:
    factor = 1.0


def drawn(x: Tensor) -> Any:
    left = (F.dropout(x, 0.5).sum() for _ in range(3))
    return next(left) + 2 * F.dropout(ended(x), 0.5).sum() + 3 * next(left)


def of_a_variable(x: Tensor) -> Any:
    factor = 1.0
    left = (x.sum() * factor for _ in range(3))
    first = ended(next(left))
    factor = 5.0
    return first + 3 * next(left)


def of_an_attribute(x: Tensor) -> Any:
    held = Held()
    left = (x.sum() * held.factor for _ in range(3))
    first = ended(next(left))
    held.factor = 5.0
    return first + 3 * next(left)


def of_memory(x: Tensor) -> Any:
    x = x.clone()
    left = (x.sum() for _ in range(3))
    first = ended(next(left))
    x += 1
    return first + 3 * next(left)


def drawn_behind(x: Tensor) -> Any:
    """It has not begun, and is told some of what it is of by its name."""

    def make(factor: float, *, of: Tensor) -> Iterator[Tensor]:
        yield F.dropout(of, 0.5).sum() * factor

    left = make(2.0, of=x)
    return F.dropout(ended(x), 0.5).sum() + next(left)


def at_its_end(x: Tensor) -> Any:
    left = (x.sum() * factor for factor in (1.0, 2.0))
    return ended(sum(left)) + len(list(left))


def of_a_list(x: Tensor) -> Any:
    rows = list(x)
    left = iter(rows)
    first = ended(next(left))
    rows[1] = rows[0] * 7
    return first.sum() + next(left).sum()


def of_a_deque(x: Tensor) -> Any:
    numbers = deque([1.0, 2.0, 3.0])
    left = iter(numbers)
    first = ended(next(left))
    numbers[2] = 9.0
    return x.sum() * first + next(left) + 3 * next(left)


class Numbers(list[float]):
    pass


def of_a_list_of_ones_own(x: Tensor) -> Any:
    numbers = Numbers([1.0, 2.0, 3.0])
    left, nothing = iter(numbers), zip()
    first = ended(next(left))
    numbers[2] = 9.0
    return x.sum() * first + max(left) + len(list(nothing))


def of_two_that_share(x: Tensor) -> Any:
    left = iter([1.0, 2.0, 3.0, 4.0, 5.0])
    counted = enumerate(left)
    first = ended(next(counted))
    return x.sum() * first[1] + 3 * next(left) + 7 * next(counted)[1]


def of_a_shorter_one(x: Tensor) -> Any:
    """``zip`` has taken one more of the longer iterator, if that is its first."""
    left, value = iter([1.0, 2.0, 3.0, 4.0]), x.sum()
    for number, factor in zip(left, (2.0, 3.0), strict=False):
        value = ended(value) * factor + number
    return value + next(left)


def of_another_length(x: Tensor) -> Any:
    left = zip((1.0, 2.0), (3.0, 4.0, 5.0), strict=True)
    first, second = ended(next(left)), next(left)
    try:
        next(left)
    except ValueError:
        return x.sum() * first[0] + second[1]
    return x.sum()


def backwards_over_numbers(x: Tensor) -> Any:
    left = reversed([1.0, 2.0, 3.0])
    first = ended(next(left))
    return x.sum() * first + 3 * next(left) + 5 * next(left)


def mapped(x: Tensor) -> Any:
    factor, numbers = 1.0, count(2)
    left = map(lambda number: x.sum() * number * factor, numbers)
    first = ended(next(left))
    factor = 5.0
    return first + next(numbers) + 3 * next(left)


ITERATORS = (
    drawn, of_a_variable, of_an_attribute, of_memory, drawn_behind, at_its_end, of_a_list,
    of_a_deque, of_a_list_of_ones_own, of_two_that_share, of_a_shorter_one, of_another_length,
    backwards_over_numbers, mapped,
)  # fmt: skip


@pytest.mark.parametrize("ask", ITERATORS)
def test_what_an_iterator_comes_to_behind_a_break(ask: Any) -> None:
    """It was asked for all of that ahead of the break: of what was written and drawn until then."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return policy_loss(model, batch) * ask(batch["adv"])

    model = make_model()
    step = optimize(model, loss, QUIET)
    for batch in (make_batch(), make_batch(4, 9, seed=2)):
        results = []
        for function in (partial(loss, model), step):
            torch.manual_seed(3)
            results.append(outcome(function, model, batch))
        assert_same(*results)
    assert fused(step)


def test_a_loop_that_no_graph_ends_in_is_captured_with_any_number_of_layers() -> None:
    """Models of one class, one after the other, in steps whose graphs end elsewhere."""

    def plain(self: Layered, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return ended(policy_loss(model, batch)) * 2

    for depth in (3, 4, 5, 6, 7):
        model, batch = Layered(plain, depth), fixed(make_batch())
        step = optimize(model, loss_fn, QUIET)
        assert_matches_eager(step, loss_fn, model, batch)
        assert captures(step) == 2
        assert len(step.captures[0].dynamo.graph.nodes) > 3 * depth
