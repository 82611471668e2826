"""``bench.trl_options``: its cases are options that there are, and what counts as the same run."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from bench import trl_options

trl = pytest.importorskip("trl", reason="needs the extra trl")


@pytest.mark.parametrize("name", trl_options.TRAINERS)
def test_cases_are_of_options(name):
    known = {field.name for field in dataclasses.fields(getattr(trl, f"{name}Config"))}
    assert {option for case in trl_options.CASES[name] for option in case} <= known | {"lora"}


def test_what_differs_is_named():
    def run(loss, weight):
        logs = [{"loss": loss, "step_time": loss, "grad_norm": None}]
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, weight)
        return SimpleNamespace(state=SimpleNamespace(log_history=logs), model=model)

    differences = [*trl_options._differences(run(1.0, 1.0), run(1.5, 2.0))]
    assert differences == ["loss 1.5, TRL 1.0", "weight is up to 1 off"]
    assert not [*trl_options._differences(run(1.0, 1.0), run(1.0, 1.0))]
