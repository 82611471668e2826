"""What a run is made of: every change is seen, and nothing else."""

import datetime
import functools
import importlib
import math
import sys

import pytest
import torch
from torch import nn

from fxrl.ops import checksum
from fxrl.rl.loop import fingerprint


class Opaque:
    """A column's value whose text has its address."""


def test_rows_whatever_their_columns_are():
    rows = [{"prompt": "a", "day": datetime.date(2026, 1, 2), "image": Opaque(), "n": [1, 2.5]}]
    again = [dict(reversed(rows[0].items())) | {"image": Opaque()}]
    assert fingerprint.of_rows(rows) == fingerprint.of_rows(again)
    others = [
        [rows[0] | {"day": datetime.date(2026, 1, 3)}],
        [rows[0] | {"n": [1, 2.25]}],
        [*rows, {"prompt": "b"}],
        [{"prompt": "b"}, *rows],
        [{(1, 2): "keys", "that": "JSON has not"}],
    ]
    assert len({fingerprint.of_rows(value) for value in [rows, *others]}) == 6


@pytest.fixture
def written(tmp_path, monkeypatch):
    """``written(name=source, ...)`` imports ``judge`` anew, with these files changed."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(**sources):
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        for name in ("judge", "scale", "unused"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("judge")

    yield write
    for name in ("judge", "scale", "unused"):
        sys.modules.pop(name, None)


def test_code_and_what_it_uses_beside_it(written):
    judge = "import scale, json\ndef f(x):\n    return scale.by(x)\nclass C:\n    "
    judge += "def __call__(self, x):\n        return scale.by(x)\n"
    module = written(judge=judge, scale="def by(x):\n    return x\n", unused="1\n")
    found = [fingerprint.of_code(f) for f in (module.f, functools.partial(module.f), module.C())]
    assert len(set(found)) == 1
    assert found[0].startswith("judge.py and 1 files it uses, SHA-256 ")
    assert fingerprint.of_code(written(unused="2\n").f) == found[0]
    assert fingerprint.of_code(written(scale="def by(x):\n    return -x\n").f) != found[0]
    assert fingerprint.of_code(math.sqrt) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("shape", [(), (3,), (4, 6), (0,)])
def test_any_bit_of_the_weights(dtype, shape, monkeypatch):
    monkeypatch.setattr(checksum, "_PIECE", 5)
    model = nn.Module()
    values = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    model.weight = nn.Parameter(values, requires_grad=False)
    seen = {fingerprint.of_weights(model)}
    raw = model.weight.data.reshape(-1).view(torch.uint8)
    places = range(0, len(raw), 3)
    for place in places:
        raw[place] ^= 4
        model.weight.data = raw.view(dtype).reshape(shape)
        seen.add(fingerprint.of_weights(model))
        raw[place] ^= 4
    assert len(seen) == 1 + len(places)


def test_weights_wherever_they_lie():
    """A view of fused weights that begins between two words, and two values that change places."""
    whole, model = torch.randn(2, 9).bfloat16().view(-1), nn.Module()
    seen = set()
    for values in (whole[1:9], whole[1:9].clone(), whole[1:9].flip(0)):
        model.weight = nn.Parameter(values, requires_grad=False)
        seen.add(fingerprint.of_weights(model))
    assert len(seen) == 2


def test_beside_an_adapter_only_what_is_frozen_counts():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    all_of_it = fingerprint.of_weights(model)
    model[0].requires_grad_(False)
    base = fingerprint.of_weights(model)
    nn.init.zeros_(model[1].weight)
    assert fingerprint.of_weights(model) == base != all_of_it
