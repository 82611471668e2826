"""What a plan may use."""

import pytest

from fxrl import Config
from fxrl.planner import budget
from fxrl.planner.budget import Budget
from fxrl.planner.target import TARGETS


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize(("given", "all_of_it"), [("8GiB", 8 * 2**30), (None, 4 * 2**30), (0, 0)])
def test_the_ranks_of_a_host_share_its_memory(monkeypatch, ranks, given, all_of_it):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(ranks))
    monkeypatch.setattr(budget, "host_free", lambda: 5 * 2**30)  # a fifth is left to others
    config = Config(gpu_memory="1GiB", host_memory=given)
    assert Budget.of(config, TARGETS["h200"], None).host_bytes == all_of_it // ranks
