"""Several ranks: the numbers of one, and one end for all (``rank_cases.py`` runs them, on gloo)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxrl.distributed import Ranks, deal, joined
from fxrl.errors import ConfigError

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Of all groups what they said, and the folder in which they ran."""
    folder = tmp_path_factory.mktemp("ranks")
    script = Path(__file__).with_name("rank_cases.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1]) | {"folder": folder}


EXACT = ("loss", "grad_norm", "policy_loss", "kl", "entropy", "learning_rate", "nonfinite")
"""However rows are cut into micro-batches; other metrics are means or extremes of those."""


def close(ours, theirs, *, but=()):
    """The names of the numbers that are apart by more than 1e-12 of theirs."""
    assert ours.keys() == theirs.keys()
    return [
        name
        for name in ours
        if not name.endswith(but)
        and ours[name] != pytest.approx(theirs[name], rel=1e-12, abs=1e-12)
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_gradients_metrics_and_three_steps_are_those_of_one_rank(cases, size):
    """Every loss, rows padded on either side and packed, of four ranks one without any."""
    assert cases["updates"][str(size)]["codes"] == [0] * size
    found = json.loads((cases["folder"] / f"updates-{size}.json").read_text())
    del found["overlapped"]
    assert len({name.split()[0] for name in found}) == 10
    assert {name.split()[1] for name in found} == {"right", "left", "packed"}
    for name, case in found.items():
        assert case["gradient"] < 1e-12, name
        assert case["weights"] < 1e-12, name
        assert case["largest"] > 1e-5, name
        for ours, same_batches, one_batch in zip(*case["metrics"], strict=True):
            assert not close(ours, same_batches), name
            exact = (
                {name: one[name] for name in EXACT if name in one} for one in (ours, one_batch)
            )
            assert not close(*exact), name


@pytest.mark.parametrize("what", ["lora", "full", "critic", "pairs"])
def test_a_run_has_the_numbers_of_one_rank(cases, what):
    """With completions, rewards and evaluations; it went on from 2 ranks to 4. The optimizer of all
    weights is in parts, an adapter's is whole on every rank. A pair of ranks shares sequences."""
    prefix = "" if what == "lora" else f"{what} "
    runs = {size: cases["runs"].get(f"{prefix}{size}") for size in ("one", "two", "four")}
    for run in filter(None, runs.values()):
        assert set(run["codes"]) == {0}, run["said"]
    if what == "full":
        assert "its share (ZeroRedundancyOptimizer)" in runs["two"]["said"][0]
        assert "its share (ZeroRedundancyOptimizer)" in runs["four"]["said"][0]
    if what == "pairs":
        assert "applied shard-sequence" in runs["two"]["said"][0]
    ours, one = cases[what]["metrics"]
    assert len(ours) == len(one) == {"lora": 3, "full": 2, "critic": 2, "pairs": 1}[what]
    for line, other in zip(ours, one, strict=True):
        cut = ("low_min", "high_max", "padding/fraction", "padding/micro_batches")
        assert not close(line, other, but=cut)
    assert max(line["grad_norm"] for line in ours) > 1e-3
    assert cases[what]["weights"] < 1e-12


@pytest.mark.parametrize("size", [2, 4])
def test_sums_begin_in_the_last_backward_and_are_those_of_one_rank(cases, size):
    """Also where a gradient changes after its bucket has begun, where a layer is unused, and on a
    rank without any backward."""
    found = json.loads((cases["folder"] / f"updates-{size}.json").read_text())["overlapped"]
    assert [found[name]["begun"] for name in found] == [3, 3]
    assert [found[name]["stale"] for name in found] == [False, True]
    assert all(case["apart"] < 1e-12 for case in found.values())


@pytest.mark.parametrize(
    ("how", "codes", "words", "saved"),
    [
        ("raise", [1, 1], "rank 1 of 2: reward 'even' raised ValueError('no such judge')", 1),
        ("full raise", [1, 1], "rank 1 of 2: reward 'even' raised ValueError('no such judge')", 1),
        ("memory", [1, 1], "rank 1 of 2: loss 'toy:tight' (defined at toy.py", 0),
        ("shared memory", [1, 1], "rank 1 of 2: loss 'toy:tight' (defined at toy.py", 0),
        ("kill 1", [1, -9], "rank 1 of 2: its process is gone (killed, or crashed)", 1),
        ("data", [2, 2], "rank 1 of 2: it has another configuration than rank 0:", None),
        (
            "of three",
            [2, 2],
            "fxrl.context_parallel=3 lets 3 ranks share each sequence, and 2",
            None,
        ),
    ],
)
def test_what_ends_one_rank_ends_all_with_one_error(cases, how, codes, words, saved):
    group = cases["runs"][how]
    assert group["codes"] == codes
    told, other = group["said"]
    assert told.count("fxrl train:") == 1
    assert f"fxrl train: {words}" in told
    assert not other
    folder = cases["folder"] / how.replace(" ", "-")
    if saved is not None:
        assert (folder / f"checkpoints/step-{saved:08d}").is_dir()
        assert "go on with: torchrun ... -m fxrl train " in told
        assert f" run_dir={folder.name} " in told
        assert "fxrl-rank-" not in told


def test_a_failure_elsewhere_saves_all_parts_of_the_optimizer(cases):
    path = cases["folder"] / "full-raise/checkpoints/step-00000001/optimizer.pt"
    saved = torch.load(path, weights_only=True)
    assert sorted(saved["optimizer"]["state"]) == list(range(len(saved["names"])))


def test_a_part_of_the_optimizer_goes_with_its_rank(cases):
    group = cases["runs"]["full kill 1"]
    assert group["codes"] == [1, -9]
    told = group["said"][0]
    assert "the optimizer's states are on all ranks, of which one is gone" in told
    assert "what is left is the last checkpoint" in told


def test_where_rank_0_is_killed_the_next_one_tells(cases):
    group = cases["runs"]["kill 0"]
    assert group["codes"] == [-9, 1]
    told = [line for line in group["said"][1].splitlines() if line.startswith("fxrl train:")]
    assert len(told) == 1
    assert "rank 0 of 2" in told[0]
    assert "what it had not saved is lost" in told[0]


def test_an_interrupt_of_one_rank_stops_all_after_the_same_step(cases):
    group = cases["runs"]["interrupt"]
    assert group["codes"] == [130, 130]
    assert "stopped after step 1 of 3" in group["said"][0]
    assert (cases["folder"] / "interrupt/checkpoints/step-00000001").is_dir()


def test_a_rank_that_hangs_is_named(cases):
    group = cases["runs"]["late"]
    assert group["codes"] == [0, 0]
    assert set(group["said"]) == {"rank 1 of 2: it lives, and did not come within 0 s\n"}


def test_what_waiting_and_sending_cost_is_measured(cases):
    lines = (cases["folder"] / "several/metrics.jsonl").read_text().splitlines()
    for line in map(json.loads, lines):
        assert line["ranks/wait_s"] > 0
        assert 0 < line["ranks/exposed_s"] < line["step_time"]


def test_one_rank_talks(cases):
    first, *others = cases["runs"]["four"]["said"]
    assert "resumed at step 2" in first
    assert not any(others)


@pytest.mark.parametrize(
    ("costs", "size", "hands"),
    [
        ([5, 4, 3, 3, 3], 2, [[0, 3], [1, 2, 4]]),
        ([1, 1, 1], 1, [[0, 1, 2]]),
        ([2], 3, [[0], [], []]),
        ([], 2, [[], []]),
    ],
)
def test_deal(costs, size, hands):
    assert deal(costs, size) == hands


def test_alone_a_process_is_rank_0_of_1(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined() as ranks:
        assert ranks == Ranks()
        assert ranks.primary
        assert ranks.gather("it") == ["it"]
        assert ranks.broadcast("it") == "it"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("WORLD_SIZE", "two", "WORLD_SIZE='two' is no whole number"), ("RANK", "4", "RANK=4 is not")],
)
def test_an_environment_that_is_no_rank(monkeypatch, name, value, words):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words), joined():
        pass
