"""vLLM's share of the GPU and the KV cache's size, against numbers worked out by hand."""

import pytest

from fxrl.engines.ledger import Reading
from fxrl.engines.vllm.build import CONTEXT_BYTES, KvBudgetError, cache_bytes, utilization
from fxrl.engines.vllm.options import VllmOptions

GiB = 2**30


def share(*, free=139 * GiB, held=0, gpu_memory=None):
    options = VllmOptions(gpu_memory=gpu_memory, trainer_reserve="2GiB")
    return utilization(options, Reading(total=140 * GiB, free=free, reserved=held))


def test_everything_free_but_the_reserve_and_the_context():
    left = 139 * GiB - 2 * GiB - CONTEXT_BYTES
    assert share() == pytest.approx(left / (140 * GiB), abs=1e-4)
    assert share() * 140 * GiB <= left


def test_a_limit_counts_what_the_process_holds_already():
    assert share(gpu_memory=80 * GiB, held=10 * GiB) == pytest.approx(67.5 / 140, abs=1e-4)
    assert share(gpu_memory=800 * GiB) == share()


def test_other_processes_are_respected():
    assert share(free=40 * GiB) == pytest.approx(37.5 / 140, abs=1e-4)


@pytest.mark.parametrize(
    "given", [{"free": 2 * GiB}, {"gpu_memory": 12 * GiB, "held": 11 * GiB}, {"free": 0}]
)
def test_nothing_left_names_the_numbers_and_the_cure(given):
    with pytest.raises(KvBudgetError, match=r"trainer_reserve=2\.00 GiB.*lower trainer_reserve"):
        share(**given)


def cache(available, **given):
    defaults = {"per_sequence": 300, "per_block": 10, "max_num_seqs": 4, "max_model_len": 480}
    return cache_bytes(available, **defaults | given)


def test_no_more_than_can_be_used():
    assert cache(10**9) == 4 * 300 + 10
    assert cache(1210) == 1210
    assert cache(1209) == 1209


def test_one_sequence_and_the_null_block_must_fit():
    assert cache(310) == 310
    with pytest.raises(KvBudgetError, match=r"max_model_len=480.*about 478 tokens would fit.*fp8"):
        cache(309)
