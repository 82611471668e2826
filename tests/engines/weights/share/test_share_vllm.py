"""Shared weights with a real vLLM on the CPU, each in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent


def run(script, *arguments):
    """The JSON lines that a script prints; vLLM prints more."""
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return lines


def test_architectures_share_all_their_weights():
    """One whose fused layers Hugging Face splits, one it fuses too; and vLLM's packed weights."""
    qwen3, phi3, packed = run("sharing_sweep.py", "qwen3", "phi3", "llama-packed")
    for line in (qwen3, phi3):
        assert line.get("complete"), line
        assert line["logits_equal"]
        assert line["copied"] == 0
        assert line["plain_parameters"]  # none of vLLM's subclasses
        assert line["warnings"] == []
    assert "packed" in qwen3["how"]
    assert "packed" not in phi3["how"]
    assert packed["shared"] == 0, packed
    assert packed["logits_equal"]
    assert "update_weights" in packed["why"][0]


def test_an_optimizer_step_is_seen_by_the_next_rollout(tmp_path):
    """SGD writes vLLM's storages in place; nothing is synchronised."""
    (facts,) = run("sharing_engine.py", str(tmp_path))
    assert facts["complete"], facts["report"]
    assert facts["wrapped"]
    before, after = facts["before"], facts["after"]
    assert before["drift"] < 1e-4
    assert after["drift"] < 1e-4
    change = max(
        abs(b - a)
        for row_b, row_a in zip(before["logprobs"], after["logprobs"], strict=True)
        for b, a in zip(row_b, row_a, strict=True)
    )
    assert change > 0.1


def test_fp8_of_a_real_vllm(tmp_path):
    """Online per-channel quantization: values and scales are vLLM's, and the checkpoint's rounded.
    vLLM rounds activations too, so log-probs agree only so far; what stayed bf16 trains."""
    (facts,) = run("sharing_engine.py", str(tmp_path), "--quantization", "fp8_per_channel")
    assert facts["complete"], facts["report"]
    assert "FP8 scales" in facts["report"]
    assert "frozen" in facts["report"]
    assert facts["before"]["drift"] < 0.7
    assert facts["after"]["drift"] < 0.7
    assert facts["after"]["logprobs"] != facts["before"]["logprobs"]
