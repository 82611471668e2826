"""A run whose steps are compiled, killed and resumed: bit for bit what it would have been."""

from pathlib import Path

import pytest
import torch

from fxrl import optimize
from fxrl.models import load_model, lora
from fxrl.rl import Trainer
from fxrl.rl.loop import scoring
from tests.forked import autograd_forks
from tests.rl.loop.test_resume import EVERY, Killed, in_a_fork, killing, moments
from tests.rl.loop.test_train import metrics, saved_weights

CONFIG = {
    "steps": 3,
    "save_every": 1,
    "prompts_per_step": 2,
    "num_iterations": 2,
    "log_to": (),
    "sampling": {"num_generations": 4, "max_tokens": 8},
    "optim": {"lr": 1e-2},
    "fxrl": {"min_saved_bytes": 0},
}


def odd(completions, completion_ids, **columns):
    return [float(sum(ids) % 2) for ids in completion_ids]


class Runs:
    """Runs over one model, whose steps are captured once for all of them: that takes seconds."""

    def __init__(self, monkeypatch):
        base, self.tokenizer = load_model("tiny:llama:layers=1,hidden=32,heads=2,kv_heads=1")
        self.model = lora(base, 4, 8, "all-linear", dropout=0.0, seed=0)
        self.untrained = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self.steps = []
        monkeypatch.setattr(scoring, "optimize", self.optimized)

    def optimized(self, model, loss_fn, config):
        if self.made == len(self.steps):
            self.steps.append(optimize(model, loss_fn, config))
        self.made += 1
        return self.steps[self.made - 1]

    def train(self, run_dir, resume=None):
        self.made = 0
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.untrained[name])
        rows = [{"prompt": f"count to {number}"} for number in range(8)]
        config = CONFIG | {"run_dir": str(run_dir)}
        return Trainer(self.model, odd, rows, config, tokenizer=self.tokenizer).train(resume=resume)

    def goes_on(self, run):
        """A killed run ends as the whole one did."""
        self.train(run, resume="" if Path(run, "config.json").exists() else None)
        assert metrics(run) == metrics("whole"), run
        assert saved_weights(run) == saved_weights("whole"), run


def test_a_compiled_run_that_is_killed_goes_on_bit_for_bit(tmp_path, monkeypatch, request):
    """At calls that write, and as a process at any moment."""
    monkeypatch.chdir(tmp_path)
    runs = Runs(monkeypatch)
    with monkeypatch.context() as patch:
        calls = killing(patch, "whole", 10**9)
        runs.train("whole")
    assert runs.steps[0].report.of_kind("applied")
    if autograd_forks():
        _, whole = in_a_fork(lambda: runs.train("again"))
        killed = 0
        for number, seconds in enumerate(moments(whole, request)):
            run = f"killed-at-moment-{number}"
            killed += in_a_fork(lambda run=run: runs.train(run), seconds)[0]
            runs.goes_on(run)
        assert killed
    every = request.config.getoption(EVERY)
    spread = range(2, len(calls) + 1, 1 if every else len(calls) // 6)
    for number in spread:
        run = f"killed-{number}"
        with monkeypatch.context() as patch:
            killing(patch, run, number)
            with pytest.raises(Killed):
                runs.train(run)
        if number == spread[-1]:
            runs.steps.clear()  # as in another process: captured anew
        runs.goes_on(run)
