"""The route: what is impossible is never chosen, what is possible is chosen by cost."""

import pytest

from fxrl.runtime.lora_route import (
    Capabilities,
    CostModel,
    RouteError,
    backup_on_device,
    choose,
)

QWEN3_1B7 = 2_820_000_000
HUGE = 140_000_000_000


def test_long_rollouts_fold_and_very_short_ones_use_slots():
    able = Capabilities(folded_bytes=QWEN3_1B7)
    assert choose(able, decode_steps=2048).kind == "fold"
    assert choose(able, decode_steps=2).kind == "slots"


def test_a_backup_on_the_host_moves_the_break_even():
    host = Capabilities(folded_bytes=HUGE, free_device_bytes=0)
    assert not backup_on_device(host)
    assert choose(host, decode_steps=1000).kind == "slots"
    assert choose(host, decode_steps=5000).kind == "fold"
    assert "backup on the host" in choose(host, decode_steps=5000).reason
    assert choose(Capabilities(folded_bytes=HUGE), decode_steps=1000).kind == "fold"


@pytest.mark.parametrize(
    ("able", "kind", "reason"),
    [
        (Capabilities(no_fold="the weights are quantized"), "slots", "fold: the weights are quan"),
        (Capabilities(no_slots="built without LoRA"), "fold", "slots: built without LoRA"),
        (Capabilities(no_fold="not shared", no_slots="rank 512"), "copy", "fold: not shared"),
        (Capabilities(no_slots="x", no_copy="y"), "fold", "x"),
    ],
)
def test_the_only_possible_one_with_the_reason(able, kind, reason):
    route = choose(able, decode_steps=3)
    assert route.kind == kind
    assert reason in route.reason


def test_a_backup_that_fits_nowhere_rules_folding_out():
    able = Capabilities(folded_bytes=2**32, free_device_bytes=2**30, free_host_bytes=2**31)
    route = choose(able)
    assert route.kind == "slots"
    assert "4.00 GiB fits neither on the GPU (1.00 GiB free)" in route.reason
    assert "(2.00 GiB free)" in route.reason


def test_nothing_possible_names_every_reason():
    with pytest.raises(RouteError, match=r"fold: a.*slots: b.*copy: c"):
        choose(Capabilities(no_fold="a", no_slots="b", no_copy="c"))


def test_the_user_can_force_what_is_possible():
    able = Capabilities(folded_bytes=QWEN3_1B7, no_copy="the weights are shared")
    assert choose(able, decode_steps=10**6, force="slots").kind == "slots"
    assert choose(able, decode_steps=0, force="fold").kind == "fold"
    with pytest.raises(RouteError, match=r"'copy' is not possible.*shared; possible: fold, slots"):
        choose(able, force="copy")
    with pytest.raises(RouteError, match="'merge' is unknown"):
        choose(able, force="merge")


def test_measured_times_replace_the_start_values():
    able, costs = Capabilities(folded_bytes=QWEN3_1B7), CostModel()
    assert choose(able, decode_steps=100, costs=costs).kind == "fold"
    costs.observe("fold_device", 10.0)
    assert choose(able, decode_steps=100, costs=costs).kind == "slots"
    for _ in range(60):
        costs.observe("fold_device", 0.01)
    assert costs.fold_s(QWEN3_1B7, on_device=True) == pytest.approx(0.01, rel=1e-2)
    assert choose(able, decode_steps=100, costs=costs).kind == "fold"


def test_the_kernels_overhead_is_the_difference_of_two_measured_steps():
    costs = CostModel()
    start = costs.slots_s(1000, 32)
    costs.observe("step_slots", 5e-3)
    assert costs.slots_s(1000, 32) == start  # one alone says nothing
    costs.observe("step_fold", 4.5e-3)
    assert costs.slots_s(1000, 32) == pytest.approx(costs.slot_sync_s + 0.5)
    costs.observe("slots", 0.002)
    assert costs.slots_s(1000, 32) == pytest.approx(0.002 + 0.5)


def test_the_overhead_is_interpolated_between_measured_batches():
    costs = CostModel(slot_sync_s=0.0)
    at = [costs.slots_s(1, n) for n in (1, 32, 80, 128, 1000)]
    assert at == pytest.approx([1.24e-3, 1.24e-3, 1.52e-3, 1.8e-3, 1.8e-3])


def test_an_unknown_observation_is_named():
    with pytest.raises(RouteError, match="'folding'"):
        CostModel().observe("folding", 1.0)
