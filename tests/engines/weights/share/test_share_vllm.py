"""Shared weights with a real vLLM on the CPU, each case in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.engines.weights.share.sharing_sweep import ENVIRONMENT

pytestmark = pytest.mark.vllm

HERE = Path(__file__).parent
ROOT = HERE.parents[3]

#: Imports once what takes seconds, and then forks a process for each script.
FORKS = """
import json, sys
from pathlib import Path
import transformers.models.qwen3.modeling_qwen3, vllm
import vllm.model_executor.models.qwen3, vllm.v1.engine.core, vllm.v1.worker.cpu_worker
import fxrl.engines.weights.share.binder
from tests.forked import run_forked
given = json.loads(sys.argv[1])
print(json.dumps({name: run_forked(Path(file), *more) for name, (file, *more) in given.items()}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Of each case the exit code of its script, and what that said."""
    pytest.importorskip("vllm")
    sweep, engine = (str(HERE / f"sharing_{name}.py") for name in ("sweep", "engine"))
    folder = str(tmp_path_factory.mktemp("engine"))
    given = {
        "architectures": [sweep, "qwen3", "phi3", "qwen3-packed"],
        "engine": [engine, folder],
        "fp8": [engine, folder, "--quantization", "fp8_per_channel"],
    }
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def lines_of(case):
    """The JSON lines that a script prints; vLLM prints more."""
    code, words = case
    assert code == 0, words[-6000:]
    return [json.loads(line) for line in words.splitlines() if line.startswith("{")]


def test_architectures_share_all_their_weights(said):
    """One whose fused layers Hugging Face splits, one it fuses too; and vLLM's packed weights."""
    qwen3, phi3, packed = lines_of(said["architectures"])
    for line in (qwen3, phi3):
        assert line.get("complete"), line
        assert line["logits_equal"]
        assert line["copied"] == 0
        assert line["plain_parameters"]  # none of vLLM's subclasses
        assert line["warnings"] == []
    assert "packed" in qwen3["how"]
    assert "packed" not in phi3["how"]
    assert packed["logits_equal"]
    if torch.backends.cpu.get_cpu_capability() == "AVX2":  # for which vLLM has no packed kernels
        assert packed["copied"] == 0, packed
    else:
        assert packed["shared"] == 0, packed
        assert "update_weights" in packed["why"][0]


def test_an_optimizer_step_is_seen_by_the_next_rollout(said):
    """SGD writes vLLM's storages in place; nothing is synchronised."""
    (facts,) = lines_of(said["engine"])
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


def test_fp8_of_a_real_vllm(said):
    """Online per-channel quantization: values and scales are vLLM's, and the checkpoint's rounded.
    vLLM rounds activations too, so log-probs agree only so far; what stayed bf16 trains."""
    (facts,) = lines_of(said["fp8"])
    assert facts["complete"], facts["report"]
    assert "FP8 scales" in facts["report"]
    assert "frozen" in facts["report"]
    assert facts["before"]["drift"] < 0.7
    assert facts["after"]["drift"] < 0.7
    assert facts["after"]["logprobs"] != facts["before"]["logprobs"]
