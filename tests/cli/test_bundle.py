"""The bundle of ``fxrl report``: what is in it, what is not, and that trouble becomes a part."""

import errno
import importlib.metadata
import json
import os
import zipfile

import pytest
import torch
from torch import nn

import fxrl
from fxrl.cli import main
from fxrl.cli.bundle import write_bundle
from fxrl.errors import FxrlError
from tests.inspect.planted import plant_wrong_lowering

CONFIG = fxrl.Config(min_saved_bytes=0, compile_regions=False)
ADVANTAGE = 0.8126354019283746  # a number of the batch that nothing else has


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(48, 8), nn.Linear(8, 48, bias=False)

    def forward(self, ids):
        return self.head(self.embed(ids).tanh())


def loss_fn(model, batch):
    logp = torch.log_softmax(model(batch["ids"])[:, :-1], -1)
    picked = logp.gather(-1, batch["ids"][:, 1:, None])[..., 0]
    return -(picked * batch["adv"][:, None]).mean(), {"logp": picked.mean()}


def raises(model, batch):
    raise RuntimeError("<b>no such reward</b>")


@pytest.fixture
def bundled(tmp_path):
    """Writes a bundle; what was found, and its files."""

    def write(loss, config=CONFIG):
        torch.manual_seed(0)
        model = Policy().double()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        adv = torch.full((3,), ADVANTAGE, dtype=torch.float64)
        batch = {"ids": torch.randint(0, 48, (3, 7)), "adv": adv, "k": 2}
        step = fxrl.optimize(model, loss, config)
        found = write_bundle(step, batch, tmp_path / "a.zip", {"seed": 5})
        assert all((p.grad == 3.0).all() for p in model.parameters())
        with zipfile.ZipFile(tmp_path / "a.zip") as archive:
            assert archive.testzip() is None
            return found, {name: archive.read(name).decode() for name in archive.namelist()}

    return write


def test_all_about_a_step_and_no_number_of_its_batch(bundled):
    found, files = bundled(loss_fn)
    assert found.ok
    assert found.agrees
    assert files.keys() >= {
        "index.html", "setup.json", "measured.json", "plan.json", "verify.json", "dump/index.md",
        "dump/capture_0/00_dynamo.py", "dump/report.jsonl",
    }  # fmt: skip
    setup = json.loads(files["setup.json"])
    assert setup["seed"] == 5
    assert setup["config"]["min_saved_bytes"] == 0
    assert setup["batch"] == {
        "['ids']": "torch.int64 [3, 7] on cpu",
        "['adv']": "torch.float64 [3] on cpu",
        "['k']": "int",
    }
    measured = json.loads(files["measured.json"])
    assert len(measured["step_seconds"]) == 3
    assert all(0 < seconds < 60 for seconds in measured["step_seconds"])
    assert json.loads(files["verify.json"])["ok"]
    for said in ("Every part worked", "fuse-linear-logprob", "head.weight", 'href="dump/index.md"'):
        assert said in files["index.html"], said
    assert not [name for name, text in files.items() if str(ADVANTAGE)[:10] in text]


def test_a_loss_that_raises_becomes_a_part(bundled):
    found, files = bundled(raises)
    assert not found.ok
    assert {"running the step", "comparing with eager"} <= found.failures.keys()
    assert "&lt;b&gt;no such reward&lt;/b&gt;" in files["index.html"]
    assert "in raises" in files["index.html"]  # the traceback
    assert "setup.json" in files


def test_a_step_that_is_wrong_is_no_success(bundled, monkeypatch):
    plant_wrong_lowering(monkeypatch)
    found, files = bundled(loss_fn)
    assert found.agrees is False
    assert not found.ok
    assert "Something is wrong" in files["index.html"]
    assert not json.loads(files["verify.json"])["ok"]


def test_a_full_disk(bundled, monkeypatch):
    def full(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("fxrl.cli.bundle.replacing", full)
    with pytest.raises(FxrlError, match=r"a\.zip could not be written: No space left on device; f"):
        bundled(raises)


@pytest.mark.parametrize(
    ("path", "says"), [("report.tar", "must end in .zip"), ("nowhere/a.zip", "there is no folder")]
)
def test_a_path_that_cannot_be_is_told_at_once(path, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["report", "no/such/model", "--loss", "grpo", "--out", path]) == 2
    assert says in capsys.readouterr().err


def test_the_command_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny = ["tiny:qwen3:layers=1", "--loss", "grpo", "--tokens", "12", "--seed", "7"]
    config = ["--config", "min_saved_bytes=0", "compile_regions=false", "chunk_tokens=8"]
    assert main(["report", *tiny, *config, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"report": "fxrl-report.zip", "agrees": True, "failed": []}
    with zipfile.ZipFile("fxrl-report.zip") as archive:
        setup = json.loads(archive.read("setup.json"))
    assert setup["seed"] == 7
    assert setup["packages"]["torch"] == importlib.metadata.version("torch")
    assert setup["machine"]["system"]["python"]
