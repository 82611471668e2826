"""The floor: every way makes the same product, the fastest is taken, sequences add up."""

import pytest
import torch

from bench.lib import head_floor, head_inputs

SHAPE = head_inputs.Shape(24, 8, 70)


@pytest.fixture
def sets():
    return [head_inputs.peaked(SHAPE, torch.float64, "cpu", seed) for seed in range(2)]


@pytest.mark.parametrize("name", head_floor.PRODUCTS)
def test_every_way_makes_the_product(name, sets, monkeypatch):
    monkeypatch.setattr(head_floor, "_CUTS", (None, 32, 7, 5))
    at = head_floor._operands(sets)
    hidden, weight = sets[0].hidden, sets[0].weight
    grid = at.by_row.clone()
    softmax = (hidden @ weight.t()).softmax(-1)
    torch.testing.assert_close(grid, softmax, rtol=1e-5, atol=1e-6)
    want = {"logits": hidden @ weight.t(), "dh": grid @ weight, "dw": grid.t() @ hidden}[name]
    ways = head_floor._ways(name, at)
    assert len(ways) == len(set(ways)) > 4
    for way in ways:
        for buffer in (at.logits, at.dh, at.dw):
            buffer.fill_(torch.nan)
        at.__post_init__()  # from the first set again
        way.run(at)
        made = {"logits": at.logits, "dh": at.dh, "dw": at.dw}[name]
        if name == "logits" and not way.row_major:
            made = at.logits.view(SHAPE.vocab, SHAPE.tokens).t()
        torch.testing.assert_close(made, want, msg=str(way))
    torch.testing.assert_close(at.by_row, at.by_column)  # G is what it was


def test_fastest_way_and_sequences(sets, monkeypatch):
    """With a clock that charges each way a known time."""
    charged = {"logits": 1.0, "dh": 10.0, "dw": 100.0}
    ran = []
    monkeypatch.setattr(head_floor._Way, "run", lambda way, at: ran.append(way))

    def clock(work, device, *, warmup, repeats):
        ran.clear()
        work()
        return sum(charged[way.product] + (0.5 if way.row_major else 0.0) for way in ran)

    monkeypatch.setattr(head_floor.common, "median_ms", clock)
    wanted = [(1, 0, 0), (1, 1, 0), (2, 1, 1)]
    floor = head_floor.measure(sets, wanted, "cpu", 3)
    assert floor.products == charged
    assert all("column-major" in way for way in floor.ways.values())
    assert [floor.of(counts) for counts in wanted] == [1.0, 11.0, 112.0]
    assert set(head_floor.measure(sets, wanted[:1], "cpu", 3).products) == {"logits"}


def test_tokens_are_cut_where_the_gradient_is_too_large(sets, monkeypatch):
    monkeypatch.setattr(head_floor, "_MOST_BYTES", 6 * SHAPE.vocab * 8)
    monkeypatch.setattr(head_floor.common, "median_ms", lambda *given, **options: 2.0)
    floor = head_floor.measure(sets, [(1, 1, 0)], "cpu", 1)
    assert floor.scale == 4.0
    assert floor.of((1, 1, 0)) == 8.0
    assert floor.products["dh"] == 8.0
