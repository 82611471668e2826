"""TorchEngine on a GPU: the same tokens as on the CPU, and the memory comes back."""

import pytest
import torch

from fxrl.engines.engine import SamplingParams
from fxrl.engines.torch.engine import TorchEngine
from fxrl.models import load_model

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [40, 41], [77, 78, 79, 80, 81]]


FILTERS = SamplingParams(n=6, temperature=0.9, top_p=0.95, top_k=100, min_p=0.01, max_tokens=48)


@pytest.fixture(autouse=True)
def _no_tf32():
    """The float32 islands of a float64 model (RoPE, RMSNorm) must be float32 on the GPU too."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def engine_on(device, kind):
    model, tokenizer = load_model(f"tiny:{kind}", "fp64", device)
    return TorchEngine.from_tokenizer(model, tokenizer, seed=3, max_batch_tokens=600)


def test_a_tiny_model_has_the_same_weights_on_every_device():
    on_cpu, on_gpu = (engine_on(device, "qwen3").model for device in ("cpu", "cuda"))
    for a, b in zip(on_cpu.parameters(), on_gpu.parameters(), strict=True):
        assert b.device.type == "cuda"
        assert a.equal(b.cpu())


def test_a_gpu_draws_what_the_cpu_draws():
    """Random numbers come from the CPU's generator, so only the device's rounding differs.

    GPT-2, because it computes in float64 throughout: a token flips where a uniform number lies
    within 1e-14 of a boundary. Where a norm is float32 (1e-7), it would flip now and then.
    """
    drawn = [engine_on(device, "gpt2").generate(PROMPTS, FILTERS) for device in ("cpu", "cuda")]
    for on_cpu, on_gpu in zip(*drawn, strict=True):
        for a, b in zip(on_cpu, on_gpu, strict=True):
            assert a.token_ids == b.token_ids
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-9)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "mistral"])
def test_the_cpu_gives_a_gpus_tokens_the_same_logprobs(kind):
    """Nothing is drawn twice, so no rounding can flip a token; rotary embeddings, windows."""
    model = engine_on("cpu", kind).model
    for group in engine_on("cuda", kind).generate(PROMPTS, FILTERS):
        for completion in group:
            ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
            new = len(completion.token_ids)
            with torch.no_grad():
                logprobs = (model(input_ids=ids).logits[0] / 0.9).log_softmax(-1)
            expected = logprobs[-new - 1 : -1].gather(1, ids[0, -new:, None])[:, 0].tolist()
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_bf16_logprobs_are_near_a_full_forward_and_nothing_stays_allocated():
    model, tokenizer = load_model("tiny:llama:layers=4", "bf16", "cuda")
    engine = TorchEngine.from_tokenizer(model, tokenizer)
    engine.generate(PROMPTS, SamplingParams(max_tokens=2))  # libraries' workspaces
    before = torch.cuda.memory_allocated()
    groups = engine.generate(PROMPTS, SamplingParams(n=64, max_tokens=64, seed=0))
    assert torch.cuda.memory_allocated() == before
    with engine.standby():
        assert torch.cuda.memory_reserved() - torch.cuda.memory_allocated() < 32 * 2**20
    completion = groups[0][0]
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids], device="cuda")
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].float().log_softmax(-1)
    new = len(completion.token_ids)
    expected = logprobs[-new - 1 : -1].gather(1, ids[0, -new:, None])[:, 0].cpu()
    assert (expected - torch.tensor(completion.logprobs)).abs().max() < 0.1
