"""explain, plan, dump and verify: what they print and return, once for real on a tiny model."""

import json

import pytest

import fxrl
from fxrl.cli import main
from fxrl.errors import FxrlError
from fxrl.inspect.compare import VerifyReport, VerifyRow
from fxrl.ir.remark import Remark, RemarkKind, Report

TINY = ["tiny:qwen3:layers=1", "--loss", "grpo", "--batch", "2", "--tokens", "12"]
CONFIG = ["--config", "min_saved_bytes=0", "compile_regions=false", "chunk_tokens=8"]


class FakeStep:
    """A step with answers made up beforehand."""

    kind = RemarkKind.MISSED
    ok = False

    def __init__(self, model, loss_fn, config):
        self.arguments = model, loss_fn, config

    def explain(self, batch):
        return Report((Remark(self.kind, "some-pass", "mm_1", "a.py:3", "why not", "a cure", 7),))

    def verify(self, batch):
        row = VerifyRow("loss", "loss", 0.1, 0.2, 1e-5, self.ok)
        return VerifyReport(self.ok, (row,), () if self.ok else ("mm_1",))


@pytest.fixture
def step(monkeypatch):
    monkeypatch.setattr(fxrl, "optimize", FakeStep, raising=False)
    for name in ("kind", "ok"):
        monkeypatch.setattr(FakeStep, name, getattr(FakeStep, name))  # put back afterwards
    return FakeStep


def test_explain_is_1_when_nothing_is_rewritten(step, capsys):
    assert main(["explain", *TINY]) == 1
    text = capsys.readouterr().out
    assert "why not" in text
    assert "a.py:3" in text
    step.kind = RemarkKind.APPLIED
    assert main(["explain", *TINY]) == 0


def test_explain_json_is_one_remark_a_line(step, capsys):
    assert main(["explain", *TINY, "--json"]) == 1
    (remark,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (remark["kind"], remark["site"], remark["saved_bytes"]) == ("missed", "mm_1", 7)


def test_verify_is_1_when_they_disagree(step, capsys):
    assert main(["verify", *TINY]) == 1
    assert "mm_1" in capsys.readouterr().out
    step.ok = True
    assert main(["verify", *TINY, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        ((True, True), 0, "this is rank 0"),
        ((True, False), 1, "this is rank 1"),
        ((True, FxrlError("no room")), 1, "no room"),
    ],
)
def test_verify_in_ranks_is_0_where_all_of_them_agree(monkeypatch, capsys, told, code, said):
    def verdict(ok):
        row = VerifyRow("loss", "loss", 0.1, 0.2, 1e-5, ok)
        return VerifyReport(ok, (row,), ())

    def launch(config, work):
        assert (config.nproc_per_node, work.__name__) == (2, "_verify_as_rank")
        each = [one if isinstance(one, FxrlError) else verdict(one) for one in told]
        return lambda args: dict(enumerate(each))

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", launch)
    assert main(["verify", *TINY, "--ranks", "2"]) == code
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize("command", ["explain", "plan", "verify"])
def test_bad_words_are_one_line(command, capsys):
    for words, code in (
        (["tiny:qwen33", "--loss", "grpo"], 1),
        (["tiny:qwen3", "--loss", "grpoo"], 2),
        (["tiny:qwen3", "--loss", "grpo", "--config", "chunk=1"], 2),
    ):
        assert main([command, *words]) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")


def test_explain_for_real(capsys):
    argv = ["explain", *TINY, "--lora", "4", *CONFIG, "--json"]
    assert main(argv) == 0
    remarks = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert any(r["kind"] == "applied" and r["site"] for r in remarks)


def test_plan_for_real(capsys):
    assert main(["plan", *TINY, *CONFIG]) == 0
    assert "in tiles of 8 rows" in capsys.readouterr().out


def test_verify_for_real(capsys):
    assert main(["verify", *TINY, *CONFIG, "--dtype", "fp64"]) == 0
    assert "ok: " in capsys.readouterr().out


def test_dump_for_real(tmp_path, capsys):
    assert main(["dump", *TINY, *CONFIG, "--out", str(tmp_path / "d"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["remarks"] >= 1
    assert (tmp_path / "d" / "index.md").read_text().startswith("# ")
    assert list((tmp_path / "d").rglob("*fuse-linear-logprob.diff"))
    for name in ("aot/forward.py", "aot/backward.py", "00_dynamo.py"):
        assert (tmp_path / "d" / "capture_0" / name).read_text()
    assert list((tmp_path / "d" / "bytecode").iterdir())


def test_a_dump_that_cannot_be_written_costs_no_time(capsys, monkeypatch):
    monkeypatch.setattr("fxrl.cli.inputs.real_model", lambda *_: pytest.fail("a model was made"))
    assert main(["dump", *TINY, "--out", "/proc/foo"]) == 1
    assert "/proc/foo cannot be written: " in capsys.readouterr().err


@pytest.mark.parametrize("picture", ["/proc/foo.png", "plan.nothing"])
def test_a_picture_that_cannot_be_drawn_costs_no_time(capsys, monkeypatch, picture):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("fxrl.cli.inputs.empty_model", lambda *_: pytest.fail("a model was made"))
    assert main(["plan", *TINY, "--plot", picture]) == 1
    assert f"{picture} cannot be drawn: " in capsys.readouterr().err


def test_a_number_that_is_none_is_told_in_words(capsys):
    assert main(["explain", "tiny:llama", "--loss", "grpo", "--batch", "x"]) == 2
    assert "argument --batch: 'x' is no whole number" in capsys.readouterr().err
