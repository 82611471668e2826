"""Factors put into the real vLLM: bit for bit its loading of a file, and what it generates."""

from types import SimpleNamespace

import pytest
import torch

from fxrl.engines.vllm.handle import ADAPTER_ID, put_adapter
from fxrl.engines.weights.lora.sites import lora_sites
from tests.engines.weights.lora.lora_models import fill, same_bits, stacked, with_lora

pytestmark = pytest.mark.vllm

PROMPTS = [[5, 9, 77, 31, 8], [101, 44, 3, 60, 61, 62, 7], [12] * 20]
LENGTH = 12


def make_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def served(tmp_path_factory, vllm_process):
    """A vLLM engine with the adapter loaded by vLLM itself, and the trainer's model beside it."""
    folder = tmp_path_factory.mktemp("slots")
    make_model().save_pretrained(folder / "base")
    model = with_lora(make_model(), r=4, lora_alpha=7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(2)
    model.save_pretrained(folder / "adapter")
    for key in ("VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS"):
        vllm_process.setenv(key, "1")
    vllm_process.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    llm = LLM(
        model=str(folder / "base"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=8,
        enforce_eager=True,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=1,
        distributed_executor_backend="uni",
    )
    request = LoRARequest("policy", ADAPTER_ID, str(folder / "adapter"))
    worker = llm.llm_engine.model_executor.driver_worker.worker
    manager = worker.model_runner.lora_manager._adapter_manager
    return SimpleNamespace(llm=llm, model=model, request=request, manager=manager, worker=worker)


def generate(served, lora=True):
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=LENGTH, ignore_eos=True, logprobs=0, detokenize=False
    )
    served.llm.reset_prefix_cache()
    rows = served.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        params,
        use_tqdm=False,
        lora_request=served.request if lora else None,
    )
    tokens = [list(row.outputs[0].token_ids) for row in rows]
    logps = [
        [places[t].logprob for places, t in zip(row.outputs[0].logprobs, ids, strict=True)]
        for row, ids in zip(rows, tokens, strict=True)
    ]
    return tokens, logps


@torch.no_grad()
def trainer_logps(served, tokens):
    found = []
    for prompt, new in zip(PROMPTS, tokens, strict=True):
        ids = torch.tensor([prompt + new])
        logps = served.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found.append(logps.gather(-1, ids[0, len(prompt) :, None])[:, 0].tolist())
    return found


def assert_agrees(served, tokens, logps):
    want = torch.tensor(trainer_logps(served, tokens))
    torch.testing.assert_close(torch.tensor(logps), want, rtol=0, atol=1e-4)


def put(served):
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    sites = lora_sites(served.model)
    put_adapter(served.worker, sites, lora_model=LoRAModel, peft_helper=PEFTHelper)


def test_slots(served):
    """One story, since the engine is expensive: load, verify, update, zero, restore."""
    base = generate(served, lora=False)

    assert served.llm.llm_engine.add_lora(served.request)
    loaded = generate(served)
    assert_agrees(served, *loaded)
    theirs = stacked(served.manager)
    places = [t.data_ptr() for t in tensors(served.manager)]
    put(served)
    assert same_bits(theirs, stacked(served.manager))  # every byte is what the file put there
    assert generate(served) == loaded

    fill(served.model, seed=11)
    put(served)
    updated = generate(served)
    assert updated != loaded
    assert_agrees(served, *updated)
    assert not same_bits(theirs, stacked(served.manager))

    with torch.no_grad():
        for name, parameter in served.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    put(served)
    assert generate(served) == base  # exactly: 0 is added
    assert [t.data_ptr() for t in tensors(served.manager)] == places  # CUDA graphs stay valid


def tensors(manager):
    return [
        t for one in manager.modules.values() for t in (*one.lora_a_stacked, *one.lora_b_stacked)
    ]
