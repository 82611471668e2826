"""A real vLLM on the CPU for the tests marked ``vllm``; nothing of it runs in the others."""

import gc
from contextlib import contextmanager

import pytest
import torch

MODEL = "tiny:qwen3:head_dim=32,layers=2"
MAX_MODEL_LEN = 96


@pytest.fixture(autouse=True)
def _imports_stay_frozen(request, monkeypatch):
    """What vLLM froze is looked at when its engine is gone; without vLLM that is all of PyTorch,
    in each collection from then on."""
    if request.node.get_closest_marker("vllm") is None:
        monkeypatch.setattr(gc, "unfreeze", lambda: None)


@contextmanager
def eager_torch():
    """vLLM compiles pieces of its sampler: a minute on a CPU, and nothing that is tested here."""
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True):
        yield


@pytest.fixture(scope="session")
def vllm_process():
    """Settings for vLLM on a CPU, for the whole process: it caches what it has read."""
    pytest.importorskip("vllm")
    with pytest.MonkeyPatch.context() as patch, eager_torch():
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        yield patch


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, vllm_process):
    """The folder of a tiny random model; no tokenizer, engines never see text."""
    from fxrl.models import load_model

    folder = tmp_path_factory.mktemp("tiny")
    load_model(MODEL, "fp32")[0].save_pretrained(folder)
    return folder


def fresh_model(checkpoint):
    """The checkpoint's model, with weights of its own."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def build_engine(checkpoint, **options):
    from fxrl.engines import VllmEngine, VllmOptions

    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 16,
        "cpu_kv_cache": "256MiB",
    }
    return VllmEngine(checkpoint, VllmOptions(**given | options), eos_token_ids=[2], seed=7)


@pytest.fixture(scope="session")
def engine(checkpoint):
    """One for all tests; with LoRA slots. Its weights are packed, as vLLM does on a CPU.

    A test that changes its weights puts the checkpoint's back.
    """
    engine = build_engine(checkpoint, max_lora_rank=8)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def shared_engine(checkpoint, vllm_process):
    """One whose weights stay visible, as on a GPU, so that they can be shared.

    vLLM packs linear layers for its CPU kernels; here they keep their weight and run ``F.linear``.
    """
    from vllm.model_executor.layers import utils

    def keep(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "dispatch_cpu_unquantized_gemm", keep)
        engine = build_engine(checkpoint, engine_args={"block_size": 32})
        yield engine
        engine.close()


def reference_logprobs(model, completion, temperature=1.0):
    """[tokens] float32 log-probabilities of the completion's tokens under ``model``."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    start = len(completion.prompt_token_ids)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, start - 1 : -1].float()
    return (logits / (temperature or 1)).log_softmax(-1).gather(-1, ids[0, start:, None])[:, 0]


def assert_agrees(model, groups, temperature=1.0, atol=1e-3):
    for completion in (one for group in groups for one in group):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            reference_logprobs(model, completion, temperature),
            atol=atol,
            rtol=0,
        )
