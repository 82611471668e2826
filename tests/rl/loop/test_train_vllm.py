"""``fxrl train`` with a real vLLM on a CPU: trains, resumes exactly, closes the engine."""

import json
from pathlib import Path

import pytest
import torch

from fxrl.rl.train import main
from tests.rl.metrics import numbers

pytestmark = pytest.mark.vllm

OVERRIDES = [
    "engine=vllm",
    "model.id=tiny:qwen3:layers=1,hidden=64,heads=2,kv_heads=1,head_dim=32",
    "vllm.enforce_eager=true",
    "vllm.cpu_kv_cache=256MiB",
    "vllm.max_lora_rank=8",
    "optim.lr=0.05",
    "eval.size=2",
    "save_every=1",
]


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Only for speed: nothing of vLLM's or ours is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def train(file, run_dir, *overrides, resume=None):
    extra = [*OVERRIDES, f"run_dir={run_dir}", *overrides]
    return main(str(file), extra, resume=resume, json=True)


def test_a_run_and_its_continuation(config_file, capsys):
    assert train(config_file, "whole", "steps=2") == 0
    events = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    told = "\n".join(e["text"] for e in events if e["event"] in ("message", "stage"))
    assert "max_num_seqs=8" in told
    assert "rollouts take the trained weights by 'slots'" in told
    first, second = numbers("whole")
    # drawn by vLLM, judged by the trainer: the same distribution, before and after an update
    for line in (first, second):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-5, "the second step's completions were drawn by a policy that moved"
    timed = json.loads(Path("whole/metrics.jsonl").read_text().splitlines()[1])
    assert timed["time/generate"] > 0
    assert timed["time/sync"] > 0
    assert (Path("whole") / "run.html").is_file()
    assert json.loads(Path("whole/ledger.json").read_text())[0]["event"] == "before load"
    assert (Path("whole") / "model" / "config.json").is_file()
    assert train(config_file, "parts", "steps=1") == 0
    assert train(config_file, "parts", "steps=2", resume="") == 0
    assert [line["loss"] for line in numbers("parts")] == [
        line["loss"] for line in numbers("whole")
    ]
    assert numbers("parts")[1]["reward"] == second["reward"]
    newest = Path("whole/checkpoints/step-00000002")
    serves("whole/model", newest)


def serves(base, adapter):
    """vLLM itself takes a checkpoint for an adapter, and has PEFT's log-probs under it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    ids = [5, 17, 301, 42, 7, 260]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        before = plain(torch.tensor([ids])).logits.log_softmax(-1)
        model = PeftModel.from_pretrained(plain, adapter)
        after = model(torch.tensor([ids])).logits.log_softmax(-1)
    llm = LLM(
        str(base),
        dtype="float32",
        enable_lora=True,
        max_lora_rank=8,
        enforce_eager=True,
        max_model_len=32,
        kv_cache_memory_bytes=2**26,
        skip_tokenizer_init=True,
    )
    request = LoRARequest("checkpoint", 1, str(adapter.resolve()))
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (given,) = llm.generate({"prompt_token_ids": ids}, params, lora_request=request, use_tqdm=False)
    moved = 0.0
    for place, (token, told) in enumerate(zip(ids[1:], given.prompt_logprobs[1:], strict=True)):
        assert told[token].logprob == pytest.approx(float(after[0, place, token]), abs=1e-4)
        moved += abs(float(after[0, place, token] - before[0, place, token]))
    assert moved > 1e-2, "an adapter that changes nothing would show nothing"


@pytest.mark.parametrize("slots", ["8", "none"])
def test_another_runs_adapter_is_trained_further(config_file, slots):
    """In vLLM's slots, or folded into its weights; the other run draws for itself."""
    assert train(config_file, "first", "steps=1", "engine=torch") == 0
    further = ("model.id=first/final", "model.lora=none", f"vllm.max_lora_rank={slots}")
    assert train(config_file, "second", "steps=2", *further) == 0
    first, second = numbers("second")
    for line in (first, second):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl"] > 1e-5


@pytest.mark.parametrize("adapter", ["model.lora.r=4", "model.lora=none"])
def test_a_value_head_is_the_trainers_alone(config_file, adapter):
    """However the weights get into vLLM, PPO's value head stays out of it."""
    ppo = ("loss.name=ppo", "loss.kl_coef=0.1", "loss.beta=0", "num_iterations=2", "steps=2")
    assert train(config_file, "ppo", adapter, *ppo) == 0
    for line in numbers("ppo"):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
        assert line["value_loss"] > 0
    assert (Path("ppo") / "final" / "value_head.safetensors").is_file()


def test_all_weights_are_copied_where_they_cannot_be_shared(config_file, capsys):
    extra = ("model.lora=none", "vllm.max_lora_rank=none", "optim.lr=1e-2", "eval.size=0")
    assert train(config_file, "full", "steps=2", *extra) == 0
    assert "by 'copy': the trainer has weights of its own" in capsys.readouterr().out
    for line in numbers("full"):
        assert line["sampling/sampling_logp_difference/max"] < 1e-3
    assert numbers("full")[1]["kl"] > 1e-3
