"""``bench.head`` on tiny shapes: its yardsticks are right, and whatever a variant does is a row."""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import time
from types import SimpleNamespace

import pytest
import torch

from bench import head
from bench.lib import common, head_case, head_inputs, head_peers

SHAPE = head_inputs.Shape(45, 64, 301)
TINY = ["--shapes", "45,64,301", "--device", "cpu", "--repeats", "2"]


def run(tmp_path, *arguments):
    """The rows as dictionaries, and the whole record."""
    out = tmp_path / "head.json"
    assert head.main([*TINY, *arguments, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["columns"] == list(head.COLUMNS)
    return [dict(zip(record["columns"], row, strict=True)) for row in record["rows"]], record


def planted(title, make):
    return head_peers.Variant(title, "no-such-distribution", make)


def logprob_bound(dtype):
    """Worst rounding error of a log-prob from products of ``dtype`` that are summed in float32.

    A dot product of length H is off by H 2^-24 |h||w| at most (Cauchy-Schwarz bounds the sum of the
    magnitudes), a log-prob by twice that; a sum of V positive terms by V 2^-24 of itself.
    """
    inputs = head_inputs.peaked(SHAPE, dtype, "cpu", 0)
    size = inputs.hidden.double().norm(dim=1).max() * inputs.weight.double().norm(dim=1).max()
    return (2 * SHAPE.hidden * size.item() + SHAPE.vocab) * 2**-24


def test_rows_of_every_mode(tmp_path):
    rows, record = run(tmp_path, "--modes", "all", "--variants", "fxrl,eager")
    assert [(row["mode"], row["variant"]) for row in rows] == [
        (mode, variant) for mode in head_case.MODES for variant in ("fxrl", "eager")
    ]
    assert set(record["floors"]) == {"45,64,301"}
    for row in rows:
        mode = head_case.MODES[row["mode"]]
        assert row["error"] is None
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["ms"], rel=1e-4)
        for name, measured in (
            ("logprob_error", True),
            ("entropy_error", mode.entropy),
            ("dh_error", mode.hidden_grad),
            ("dw_error", mode.weight_grad),
        ):
            assert (row[name] is not None) == measured, (row["mode"], name)
    bound = logprob_bound(torch.bfloat16)
    for ours, eager in zip(rows[::2], rows[1::2], strict=True):
        assert ours["logprob_error"] < bound < 5e-4
        # Eager rounds logits of up to 16 to bf16 (half of 2^-4), and the ruler can tell.
        assert bound < eager["logprob_error"] < 2 * 2**-5
        # dH and dW are rounded to bf16 twice: as a vector, and times its incoming scalar.
        for name in ("dh_error", "dw_error"):
            assert ours[name] is None or ours[name] < 2 * 2**-9
            assert eager[name] is None or eager[name] < 1e-2


def test_other_dtypes_and_checked_rows(tmp_path):
    options = ("--modes", "trainable", "--variants", "fxrl", "--dtype", "fp32", "--error-rows", "7")
    (row,), record = run(tmp_path, *options)
    assert row["logprob_error"] < logprob_bound(torch.float32)
    assert row["dh_error"] < 1e-5
    assert row["dw_error"] is None
    assert any("over 7 tokens" in note and "not measured" in note for note in record["notes"])


def test_compile_and_failing_variants_are_rows(tmp_path, monkeypatch):
    def raises(mode):
        raise RuntimeError("planted\nsecond line")

    def nan(mode):
        return lambda h, w, t: (h.sum(1) * math.nan, None)

    def slow(mode):
        def swallow(h, w, t):
            try:
                time.sleep(30)
            except Exception:
                time.sleep(30)

        return swallow

    monkeypatch.setitem(head_peers.VARIANTS, "raises", planted("raises", raises))
    monkeypatch.setitem(head_peers.VARIANTS, "nan", planted("nan", nan))
    monkeypatch.setitem(head_peers.VARIANTS, "eager", planted("missing", _imports_nothing))
    names = "raises,nan,eager,liger-cute,cce,compile"
    rows, _ = run(tmp_path, "--modes", "frozen", "--variants", names)
    found = {row["variant"]: row for row in rows}
    assert found["raises"]["error"] == "RuntimeError: planted"
    assert found["raises"]["ms"] is None
    assert found["nan"]["ms"] > 0
    assert "not finite: logprob_error, dh_error" in found["nan"]["error"]
    assert "no_such_package" in found["missing"]["error"]
    for peer in ("Liger CuTe scaled CE", "CCE"):  # they need a GPU, installed or not
        assert found[peer]["error"]
        assert found[peer]["ms"] is None
    assert found["torch.compile"]["error"] is None
    assert found["torch.compile"]["dh_error"] < 1e-2

    monkeypatch.setitem(head_peers.VARIANTS, "slow", planted("slow", slow))
    options = ("--modes", "frozen", "--variants", "slow,fxrl", "--row-limit", "3")
    (late, after), _ = run(tmp_path, *options)
    assert late["error"] == "TimeLimitReached: took longer than 3 s"
    assert after["error"] is None


def test_time_limit_and_append(tmp_path, monkeypatch, capsys):
    calls, seconds = [], [0.0]
    monkeypatch.setattr(head, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    def instant(mode):
        calls.append(mode.name)
        return lambda h, w, t: ((h @ w.t()).log_softmax(-1)[:, 0], None)

    def slow(mode):
        if "--time-limit" in given:
            seconds[0] += 1000.0
            raise common.TimeLimitReached  # what the alarm does
        return instant(mode)

    monkeypatch.setitem(head_peers.VARIANTS, "slow", planted("slow", slow))
    monkeypatch.setitem(head_peers.VARIANTS, "instant", planted("instant", instant))
    options = ("--modes", "no_grad,frozen", "--variants", "instant,slow", "--append")
    given = (*options, "--time-limit", "600")
    rows, record = run(tmp_path, *given)
    assert [row["variant"] for row in rows] == ["instant"]  # slow was cut: no row, no error
    assert any("not measured: 3 rows" in note for note in record["notes"])
    assert "run again with --append" in capsys.readouterr().out
    calls.clear()
    given = (*options, "--repeats", "1")
    rows, record = run(tmp_path, *given)
    assert [(r["mode"], r["variant"]) for r in rows] == [
        ("no_grad", "instant"), ("no_grad", "slow"), ("frozen", "instant"), ("frozen", "slow"),
    ]  # fmt: skip
    assert calls == ["no_grad", "frozen", "frozen"]
    assert not any("not measured:" in note for note in record["notes"])
    calls.clear()
    run(tmp_path, *options)
    assert calls == []
    arguments = [*TINY, *options, "--out", str(tmp_path / "head.json"), "--sets", "2"]
    assert head.main(arguments) == 2  # other inputs do not go into the same file
    assert "cannot append" in capsys.readouterr().err


def test_append_measures_again_what_was_not_installed(tmp_path, monkeypatch):
    def peer(package, make):
        variant = head_peers.Variant("peer", package, make)
        monkeypatch.setitem(head_peers.VARIANTS, "peer", variant)

    options = ("--modes", "no_grad", "--variants", "peer", "--append")
    peer("no-such-distribution", _imports_nothing)
    (row,), _ = run(tmp_path, *options)
    assert "no_such_package" in row["error"]
    (row,), _ = run(tmp_path, *options)
    assert row["version"] is None
    peer("torch", lambda mode: lambda h, w, t: ((h @ w.t())[:, 0].float(), None))
    (row,), _ = run(tmp_path, *options)
    assert row["error"] is None
    assert row["version"] == importlib.metadata.version("torch")


def test_exit_codes(tmp_path, monkeypatch):
    """1 if fxrl fails; what it says it cannot do, and what fails elsewhere, is a result."""
    wanted = ["--modes", "frozen", "--out", str(tmp_path / "a.json")]

    def broken(mode):
        raise RuntimeError("planted")

    monkeypatch.setitem(head_peers.VARIANTS, "eager", planted("eager", broken))
    assert head.main([*TINY, *wanted, "--variants", "eager,fxrl"]) == 0
    ours = dataclasses.replace(head_peers.VARIANTS["fxrl"], make=broken)
    monkeypatch.setitem(head_peers.VARIANTS, "fxrl", ours)
    assert head.main([*TINY, *wanted, "--variants", "eager,fxrl"]) == 1


def _imports_nothing(mode):
    import no_such_package  # noqa: F401


@pytest.mark.parametrize("name", head_case.MODES)
def test_truth_is_what_autograd_says(name, monkeypatch):
    monkeypatch.setattr(head_case, "_TILE_BYTES", 8 * SHAPE.vocab * 13)  # several tiles, one cut
    monkeypatch.setattr(head_case, "CHECKED_VOCAB", 97)
    mode = head_case.MODES[name]
    inputs = head_inputs.peaked(SHAPE, torch.float64, "cpu", 3)
    want = head_case.truth(inputs, mode)
    head_case.require(inputs, mode)
    got = head.call(_double_head(mode), inputs, mode)
    assert want.vocab.numel() == 97
    found = head_case.errors(got, want)
    assert len(found) == 1 + mode.hidden_grad + mode.weight_grad + mode.entropy
    assert max(found.values()) < 1e-12


def _double_head(mode):
    def compute(hidden, weight, target):
        logits = hidden @ weight.T
        if mode.softcap:
            logits = mode.softcap * torch.tanh(logits / mode.softcap)
        distribution = torch.distributions.Categorical(logits=logits)
        entropy = distribution.entropy() if mode.entropy else None
        return distribution.log_prob(target), entropy

    return compute


def test_errors_find_what_is_wrong():
    mode = head_case.MODES["trainable"]
    inputs = head_inputs.peaked(SHAPE, torch.float64, "cpu", 5)
    want = head_case.truth(inputs, mode)
    right = dataclasses.replace(want.outcome, entropy=None)
    assert set(head_case.errors(right, want).values()) == {0.0}
    logprob = right.logprob.clone()
    logprob[-1] += 0.5
    wrong = head_case.Outcome(logprob, None, 1.25 * right.dh, -right.dw)
    found = head_case.errors(wrong, want)
    assert found == pytest.approx({"logprob_error": 0.5, "dh_error": 0.25, "dw_error": 2.0})


def test_inputs_are_peaked():
    inputs = head_inputs.peaked(head_inputs.Shape(2000, 256, 5000), torch.bfloat16, "cpu", 0)
    logprob = head_case.truth(inputs, head_case.MODES["no_grad"]).outcome.logprob
    assert logprob.min() < -8  # ln 5000 = 8.5: tokens that the head does not favour
    assert (logprob > -0.05).double().mean() > 0.1  # and tokens it is sure of


def test_products_of_the_modes():
    assert {name: mode.products for name, mode in head_case.MODES.items()} == {
        "no_grad": (1, 0, 0),
        "frozen": (1, 1, 0),
        "trainable": (2, 1, 1),
        "frozen+entropy": (1, 1, 0),
        "frozen+softcap": (1, 1, 0),
        "frozen+entropy_grad": (2, 1, 0),
    }


def test_shapes():
    assert head_case.parse_shapes("1,2,3;40,50,60") == [(1, 2, 3), (40, 50, 60)]
    assert (16384, 4096, 151936) in head_case.parse_shapes("issue")
    for text in ("1,2", "1,2,3,4", "a,2,3", "0,2,3", "", "1,2,3;"):
        with pytest.raises(argparse.ArgumentTypeError, match="neither N,H,V"):
            head_case.parse_shapes(text)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--variants", "fxrl,tlr"], "no variant tlr; there are fxrl"),
        (["--modes", "forward"], "no mode forward"),
        (["--repeats", "0"], "not a positive number"),
        (["--time-limit", "0"], "must be positive"),
        (["--row-limit", "-1"], "must be positive"),
        (["--append"], "name it with --out"),
        (["--inputs", "gauss"], "neither peaked"),
        (["--inputs", "model:tiny:qwen3"], "H,V = 64,"),
    ],
)
def test_bad_arguments(arguments, says, capsys):
    with pytest.raises(SystemExit) as stop:
        head.main([*TINY, *arguments])
    assert stop.value.code == 2
    assert says in capsys.readouterr().err
