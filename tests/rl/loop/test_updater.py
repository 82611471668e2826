"""Updates that are not finite are skipped, counted, and end the run with the batch saved."""

import copy
import functools
import math

import pytest
import torch
from torch import nn

from fxrl.rl.config.tables import LossConfig
from fxrl.rl.errors import NonFiniteError
from fxrl.rl.loop.batching import Share
from fxrl.rl.loop.metrics import mean_of, merge_metrics
from fxrl.rl.loop.updater import Updater


class Scripted:
    """A loss whose value or gradient is spoilt as the script says."""

    def __init__(self, tmp_path, script, max_nonfinite=3, max_grad_norm=1.0):
        self.weight = nn.Parameter(torch.tensor([3.0]))
        self.script = iter(script)
        optimizer = torch.optim.SGD([self.weight], lr=0.5)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))
        self.updater = Updater(
            self.step,
            [self.weight],
            optimizer,
            schedule,
            LossConfig("dapo", normalize="update"),
            max_grad_norm,
            max_nonfinite,
            tmp_path,
        )

    def step(self, batch):
        spoil = next(self.script)
        if spoil == "loss":
            return self.weight.sum() * math.nan, {}
        if spoil == "gradient":  # finite loss, infinite gradient
            return (self.weight - self.weight.detach()).abs().sqrt().sum(), {}
        return 2.0 * self.weight.sum(), {"x": torch.tensor(1.5)}


BATCH = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "completion_mask": torch.ones(2, 2)}


def test_a_good_update_clips_and_moves(tmp_path):
    run = Scripted(tmp_path, ["good"])
    metrics = run.updater.update([BATCH], 1)
    assert run.weight.item() == pytest.approx(3.0 - 0.5)  # gradient 2 cut to norm 1
    assert metrics["grad_norm"] == pytest.approx(2.0)
    assert metrics["learning_rate"] == 0.5
    assert (metrics["loss"], metrics["nonfinite"], metrics["x"]) == (6.0, 0.0, 1.5)
    assert run.updater.schedule.get_last_lr() == [0.25]


@pytest.mark.parametrize("spoil", ["loss", "gradient"])
def test_a_bad_update_is_skipped_and_counted(tmp_path, spoil):
    run = Scripted(tmp_path, [spoil, "good", spoil], max_nonfinite=2)
    metrics = run.updater.update([BATCH], 1)
    assert run.weight.item() == 3.0
    assert metrics["nonfinite"] == 1.0
    assert metrics["grad_norm"] is None
    assert run.updater.schedule.get_last_lr() == [0.5]
    assert run.weight.grad is None
    run.updater.update([BATCH], 2)
    run.updater.update([BATCH], 3)  # one in a row again: the run goes on
    assert (run.updater.num_skipped, run.updater.num_skipped_in_a_row) == (2, 1)


def test_too_many_in_a_row_stop_the_run_with_the_batch_saved(tmp_path):
    run = Scripted(tmp_path, ["loss", "gradient"], max_nonfinite=2)
    run.updater.update([BATCH], 6)
    with pytest.raises(NonFiniteError, match=r"2 updates in a row.*nonfinite-step-7\.pt") as caught:
        run.updater.update([BATCH], 7)
    assert "lower optim.lr" in str(caught.value)
    saved = torch.load(tmp_path / "nonfinite-step-7.pt")
    assert saved["step"] == 7
    torch.testing.assert_close(saved["batches"][0], BATCH)


def test_metrics_merge_by_kind():
    names = ["entropy", "a/max", "low_min"]
    shares = [Share(tokens=0.25, sequences=0.5), Share(tokens=0.75, sequences=0.5)]
    merged = merge_metrics(names, [[1.0, 5.0, 2.0], [3.0, 4.0, 1.0]], [1.0, 1.0], shares)
    assert merged == {"entropy": 2.5, "a/max": 5.0, "low_min": 1.0}
    assert merge_metrics(["kl"], [[math.inf]], [1.0], [Share(1.0, 1.0)]) == {"kl": None}
    assert merge_metrics(["policy_loss"], [[2.0], [4.0]], [1.0, 0.5], shares) == {
        "policy_loss": 4.0
    }
    assert merge_metrics(["ratio"], [[1.0], [3.0]], [1.0, 1.0], shares, {"ratio"}) == {"ratio": 2.0}


def test_updates_of_a_step_merge_by_kind():
    updates = [{"a/max": 1.0, "b_min": 1.0, "kl": 1.0}, {"a/max": 9.0, "b_min": 3.0, "kl": None}]
    assert mean_of(updates) == {"a/max": 9.0, "b_min": 1.0, "kl": 1.0}


def test_the_device_is_read_once_a_backward(tmp_path, monkeypatch):
    """Whatever the number of micro-batches: each read of a number waits for the device."""
    reads = []
    for name in ("item", "__float__", "__bool__", "tolist"):
        plain = getattr(torch.Tensor, name)

        def counted(self, *args, plain=plain, name=name):
            reads.append(name)
            return plain(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    run = Scripted(tmp_path, ["good"] * 5)
    loss, norm, metrics = run.updater.backward([BATCH] * 5)
    assert loss == pytest.approx(5 * 6.0)
    assert norm == pytest.approx(5 * 2.0)
    assert metrics == pytest.approx({"x": 1.5})
    assert (
        reads == ["tolist"] * 2
    )  # the token counts before the first kernel, all numbers at the end


OPTIMIZERS = {
    name: found
    for name, found in vars(torch.optim).items()
    if isinstance(found, type) and issubclass(found, torch.optim.Optimizer)
} | {"SGD with momentum": functools.partial(torch.optim.SGD, momentum=0.9)}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Optimizer", "LBFGS", "SparseAdam"}))
def test_a_state_goes_on_and_hyper_parameters_do_not_come_with_it(tmp_path, name):
    """LBFGS wants a closure, SparseAdam sparse gradients: no update can use them."""

    def make():
        torch.manual_seed(0)
        shapes = [(3, 4), (2, 2)] if name == "Muon" else [(3, 4), (5,), ()]
        weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        optimizer = OPTIMIZERS[name](weights, lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (n + 1))

        def loss(batch):
            return sum((weight * weight.detach().cos()).sum() for weight in weights)

        return Updater(
            loss,
            weights,
            optimizer,
            schedule,
            LossConfig("dapo", normalize="update"),
            1.0,
            3,
            tmp_path,
        )

    first, second = make(), make()
    for _ in range(2):
        first.update([BATCH], 1)
    saved = copy.deepcopy(first.state_dict())
    for group in saved["optimizer"]["param_groups"]:
        group |= {"lr": 123.0, "initial_lr": 123.0, "weight_decay": 9.0}
    second.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(second.parameters, first.parameters, strict=True):
            mine.copy_(theirs)
    found = [run.update([BATCH], 3) for run in (first, second)]
    assert found[0] == found[1]
    assert all(map(torch.equal, first.parameters, second.parameters))
    assert first.schedule.get_last_lr() == second.schedule.get_last_lr()


def test_a_state_finds_its_parameters_by_name(tmp_path):
    """Whatever order a later version of a model or of its library lists them in."""

    def make(names):
        weights = {name: nn.Parameter(torch.full((2,), float(len(name)))) for name in names}
        optimizer = torch.optim.Adam(weights.values(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)

        def loss(batch):
            return sum((weight.sum() ** 2) * len(name) for name, weight in weights.items())

        given = (loss, list(weights.values()), optimizer, schedule, LossConfig("dapo"), None, 3)
        return weights, Updater(*given, tmp_path, names=list(names))

    (weights, first), (others, second) = make(["a", "bb"]), make(["bb", "a"])
    first.update([BATCH], 1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for name, weight in weights.items():
        here = second.optimizer.state[others[name]]["exp_avg"]
        assert torch.equal(here, first.optimizer.state[weight]["exp_avg"])
    _, third = make(["a", "cc"])
    with pytest.raises(ValueError, match="of other parameters: bb, cc"):
        third.load_state_dict(first.state_dict())
