"""``fxrl plan``: what a person sees, what a script reads, what is refused."""

import json
import re

import pytest
import torch

from fxrl.cli import commands, inputs, main, parse
from fxrl.config import MiB
from fxrl.ir.plan import Plan

TINY = ["plan", "tiny:qwen3", "--context", "4096"]
PLANNED = {}


@pytest.fixture(autouse=True)
def _planned_once(monkeypatch):
    """The same plan is shown in several ways."""
    plan = commands._outlook

    def known(args, say):
        asked = repr({**vars(args), "json": None, "plot": None})
        if asked not in PLANNED:
            PLANNED[asked] = plan(args, say)
        return PLANNED[asked]

    monkeypatch.setattr(commands, "_outlook", known)


def run(capsys, *words, code=0):
    assert main([*words]) == code
    told = capsys.readouterr()
    return told.out if code == 0 else told.err


def test_text(capsys):
    lines = run(capsys, *TINY).splitlines()
    for begin in ("GPU memory: ", "host memory: ", "step: ", "longest context: ", "binds: nothing"):
        assert sum(line.startswith(begin) for line in lines) == 1
    assert sum(line.startswith("0:") for line in lines) == 2  # one for each choice
    assert max(map(len, lines)) <= 80


def test_json(capsys):
    found = Plan.from_json(run(capsys, *TINY, "--json"))
    assert found.peak_gpu_bytes == max(moment.bytes for moment in found.timeline)
    assert found.max_context > 4096
    assert found.peak_host_bytes == 0


def test_quantised_weights_take_their_bytes(capsys):
    size = "tiny:qwen3:layers=1,hidden=512,intermediate=2048"
    words = ["plan", size, "--context", "256", "--lora", "4", "--quantization", "nf4"]
    parts = json.loads(run(capsys, *words, "--json"))["timeline"][0]["parts"]
    parameters = [*inputs.empty_model(parse(words)).parameters()]
    states = 2 * sum(p.nbytes for p in parameters if p.requires_grad)
    held = sum(p.nbytes for p in parameters) + states
    assert 0 < parts["weights and states"] - held < 65 * MiB, "the batch, and what CUDA takes"
    wide = [p for p in parameters if p.dtype == torch.uint8]
    assert sum(4 * p.nbytes for p in wide) > 6 * MiB, "which they would be in bf16"
    found = json.loads(run(capsys, *words, "--quantize-embeddings", "--json"))
    ends = 2 * inputs.empty_model(parse(words)).config.vocab_size * 512 * 2  # in bf16
    saved = parts["weights and states"] - found["timeline"][0]["parts"]["weights and states"]
    assert saved == pytest.approx((1 - 4.5 / 16) * ends, rel=0.01)
    why = "--quantization nf4 is of frozen weights, .* add --lora RANK"
    assert re.search(why, run(capsys, *TINY, "--quantization", "nf4", code=2))
    why = "--quantize-embeddings needs a format: add --quantization"
    assert re.search(why, run(capsys, *TINY, "--quantize-embeddings", code=2))


def test_embeddings_on_the_host_take_no_gpu_memory(capsys):
    size = "tiny:qwen3:layers=1,hidden=512,intermediate=2048,tie=0"
    words = ["plan", size, "--context", "256", "--lora", "4"]
    table = 2 * 512 * inputs.empty_model(parse(words)).config.vocab_size
    whole, rest = (
        json.loads(run(capsys, *words, *more, "--json"))["timeline"][0]["parts"]
        for more in ([], ["--offload-embeddings"])
    )
    assert whole["weights and states"] - rest["weights and states"] == table
    tied = [word.replace("tie=0", "tie=1") for word in words]
    for code, why, asked in (
        (2, "leave it or --offload-embeddings out", [*words, "--rollout", "8"]),
        (1, "the model has no embedding whose table nothing else computes with", tied),
        (1, "only embeddings that are trained", words[:-2]),
    ):
        told = " ".join(run(capsys, *asked, "--offload-embeddings", code=code).split())
        assert why in told


def test_sharded_weights_take_their_part_and_two_buffers(capsys):
    size = "tiny:qwen3:layers=1,hidden=1024,intermediate=8192"
    words = ["plan", size, "--context", "256", "--lora", "4", "--gpus", "2"]
    parts = json.loads(run(capsys, *words, "--sharded", "--json"))["timeline"][0]["parts"]
    model = inputs.empty_model(parse(words))
    ends = ("base_layer.weight", "embed_tokens.weight", "lm_head.weight")
    shared = [p for n, p in model.named_parameters() if n.endswith(ends)]
    assert len(shared) >= 9, "seven Linears, the table, the output layer where it is another one"
    states = 2 * sum(p.nbytes for p in model.parameters() if p.requires_grad)
    held = sum(p.nbytes for p in model.parameters()) + states
    held += 2 * max(p.nbytes for p in shared) - sum(p.nbytes for p in shared) // 2
    beside = parts["weights and states"] - held
    assert 64 * MiB < beside < 65 * MiB, "the batch, and what CUDA takes"
    for why, without in (
        ("without an adapter all are trained; add --lora RANK", ("--lora", "4")),
        ("and there is one; add --gpus N", ("--gpus", "2")),
    ):
        rest = [word for word in words if word not in without]
        assert why in run(capsys, *rest, "--sharded", code=2)
    assert "vLLM needs the weights whole" in run(
        capsys, *words, "--sharded", "--rollout", "8", code=2
    )


def test_a_sharded_head_that_another_pass_takes(capsys):
    words = ["plan", "tiny:qwen3", "--context", "256", "--lora", "4", "--gpus", "2", "--sharded"]
    words += ["--loss", "sft", "--config", "min_saved_bytes=0", "--json"]
    choices = json.loads(run(capsys, *words))["choices"].values()
    assert "chunk-vocab-region" in [choice.get("by") for choice in choices]


SLOW = [*TINY, "--target", "rtx4090"]


def test_the_target_counts(capsys):
    slow, fast = (
        json.loads(run(capsys, *words, "--json"))["step_seconds"] for words in (SLOW, TINY)
    )
    assert slow > fast > 0


def test_more_memory_is_a_longer_context(capsys):
    short, long = (
        json.loads(run(capsys, *TINY, *budget, "--json"))["max_context"]
        for budget in (["--gpu-memory", "256MiB"], [])
    )
    assert long > 1.5 * short


def test_a_second_micro_batch_finds_gradients(capsys):
    first, later = (
        json.loads(run(capsys, *TINY, *more, "--json"))["peak_gpu_bytes"]
        for more in ([], ["--accumulate"])
    )
    parameters = [*inputs.empty_model(parse(TINY)).parameters()]
    assert later - first == sum(p.nbytes for p in parameters)


def test_a_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.png"
    run(capsys, *TINY, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_two_plans_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fxrl.ir.table.DEFAULT_WIDTH", 50)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, words in zip(files, (TINY, SLOW), strict=True):
        file.write_text(run(capsys, *words, "--json"))
    told = run(capsys, "plan", "diff", *map(str, files))
    assert "peak gpu bytes" in told
    assert max(map(len, told.splitlines())) <= 50  # folded between words
    same = run(capsys, "plan", "diff", str(files[0]), str(files[0]))
    assert "no choice differs" in same


ROLLOUT = [*TINY, "--gpu-memory", "1GiB", "--rollout", "9999", "--fit"]


def test_a_rollout_and_what_fits(capsys):
    found = json.loads(run(capsys, *ROLLOUT, "--json"))
    plan, rollout = Plan.from_json(json.dumps(found)), found["rollout"]
    first, *update = plan.timeline
    assert first.phase == "rollout"
    assert first.bytes == rollout["gpu_bytes"] <= 2**30
    assert plan.peak_gpu_bytes == max(moment.bytes for moment in plan.timeline)
    assert {moment.parts["engine"] for moment in update} == {rollout["engine"]}
    assert rollout["asked"] == 9999 > rollout["sequences"] == rollout["most"] > 1
    (here,) = (fit for fit in found["fits"] if fit["tokens"] == 4096)
    assert here["sequences"] == rollout["most"]
    assert {"tokens", "rows", "seconds", "host_bytes"} <= here.keys()
    sizes = [fit["rows"] for fit in found["fits"]]
    assert sizes == sorted(sizes, reverse=True)
    assert found["binds"] == []


def test_the_same_for_people(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.svg"
    text = run(capsys, *ROLLOUT, "--plot", str(file))
    assert max(map(len, text.splitlines())) <= 80
    for said in ("highest in the rollout", "wait for their turn", "rollout at once"):
        assert said in " ".join(text.split())
    assert file.read_text().startswith("<?xml")


def test_one_of_several_gpus(capsys):
    words = [*TINY, "--gpu-memory", "1GiB", "--lora", "4", "--rollout", "9"]
    words += ["--host-memory", "8GiB"]
    alone, one = (
        json.loads(run(capsys, *words, *more, "--json")) for more in ([], ["--gpus", "2"])
    )
    assert (one["gpus"], one["rollout"]["asked"]) == (2, 5)
    *step, last = one["timeline"]
    assert last["phase"] == "sum"
    assert 0 < last["parts"]["gradients"] <= last["parts"]["bucket"]
    assert [moment["phase"] for moment in step] == [m["phase"] for m in alone["timeline"]]
    assert sum(last["parts"].values()) <= one["peak_gpu_bytes"]
    weights = [word for word in words if word not in ("--lora", "4")]
    full = json.loads(run(capsys, *weights, "--gpus", "2", "--json"))
    gradients = full["timeline"][-1]["parts"]["gradients"]
    (update, summed), (of_lora, with_lora) = (
        [moment["parts"]["weights and states"] for moment in found["timeline"][-2:]]
        for found in (full, one)
    )
    assert summed == 2 * gradients  # of AdamW's two states of all weights this rank has half
    assert abs((update - summed) - (of_lora - with_lora)) < gradients / 2
    text = run(capsys, *words, "--gpus", "2")
    assert max(map(len, text.splitlines())) <= 80
    assert "this is one of 2 GPUs of a host" in " ".join(text.split())


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ([*TINY, "--gpu-memory", "70MiB"], 1, "no plan fits gpu_memory"),
        ([*TINY, "--gpu-memory", "lots"], 2, "'lots'"),
        ([*TINY, "--target", "h900"], 2, "h900"),
        ([*TINY, "--gpu-memory", "512MiB", "--rollout", "8"], 2, "a sleeping engine holds"),
        (["plan", "diff", "a.json"], 2, "two"),
        (["plan", "diff", "no-such-a.json", "no-such-b.json"], 2, "no-such-a.json"),
    ],
)
def test_what_cannot_be(capsys, words, code, told):
    error = run(capsys, *words, code=code)
    assert told in error
    assert "error: " in error  # behind what was done until then, on a slow machine


def test_gpus_that_share_each_sequence(capsys):
    words = [*TINY, "--lora", "4", "--gpus", "4", "--host-memory", "1GiB"]
    words += ["--gpu-memory", "256MiB", "--config"]
    contexts = {}
    for sharing in (1, 2):
        told = json.loads(run(capsys, *words, f"context_parallel={sharing}", "--json"))
        assert told.get("context_parallel", 1) == sharing
        contexts[sharing] = told["max_context"]
    assert contexts[2] > 1.5 * contexts[1]
    assert "2 share each sequence: this is one of 4" in " ".join(
        run(capsys, *words, "context_parallel=2").split()
    )
    why = "3 GPUs share each sequence, which does not divide --gpus 4"
    assert why in run(capsys, *words, "context_parallel=3", code=2)
