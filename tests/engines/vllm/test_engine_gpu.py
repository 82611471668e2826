"""The real vLLM on a GPU: the KV cache's memory goes and comes, and nothing else does.

One engine for all tests. ``pytest -m 'vllm and gpu' tests/engines/vllm/test_engine_gpu.py``
"""

import random

import pytest
import torch

from fxrl.engines import SamplingParams, VllmEngine, VllmOptions
from fxrl.engines.ledger import TOLERANCE
from fxrl.engines.vllm import door
from fxrl.engines.vllm.decode_steps import DecodeSteps
from fxrl.engines.vllm.options import HOPPER
from fxrl.engines.vllm.standby import WakeError
from fxrl.models import load_model, lora
from tests.engines.conftest import reference_logprobs
from tests.engines.vllm.test_decode_steps import check_agreement

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]

MODEL = "tiny:qwen3:head_dim=64,hidden=256,heads=8,kv_heads=4,intermediate=512,positions=4096"
GREEDY = SamplingParams(temperature=0, max_tokens=24)
GiB = 2**30


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    folder = tmp_path_factory.mktemp("gpu")
    load_model(MODEL, "bf16")[0].save_pretrained(folder)
    options = VllmOptions(
        max_model_len=4096, max_num_seqs=256, max_lora_rank=8, engine_args={"block_size": 16}
    )
    engine = VllmEngine(folder, options, eos_token_ids=[2], seed=7)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared(engine):
    return engine.shared_model()


def prompts(seed, count=32):
    draw = random.Random(seed)
    return [[draw.randrange(3, 300) for _ in range(draw.randrange(20, 60))] for _ in range(count)]


def test_the_first_rollout_compiles_nothing(engine, monkeypatch):
    import triton

    compiled = []

    def note(*, fn, **_):
        compiled.append(fn.name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    engine.generate(prompts(0, count=256), SamplingParams(max_tokens=4))
    assert not compiled


def test_the_cache_is_what_can_be_used(engine):
    config = engine._handle.engine.vllm_config.cache_config
    assert config.num_gpu_blocks == 256 * (4096 // config.block_size) + 1
    entry = engine.ledger.entries("load")[0]
    assert entry.kv_cache > 2 * GiB
    assert abs(entry.outside) < 4 * GiB


def test_decode_steps_run_fxrls_kernel_where_it_was_measured(engine):
    """Hopper, and this engine's context: FlashAttention's own place is taken."""
    groups = engine._handle.worker.model_runner.attn_groups
    backends = {one.backend for group in groups for one in group}
    fast = torch.cuda.get_device_capability() == HOPPER
    assert {b.__name__.startswith("FastBackend") for b in backends} == {fast}
    assert {b.get_name() for b in backends} == {"FLASH_ATTN"}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_decode_steps_are_scheduled_as_this_vllm_does(engine, asynchronous):
    core = engine._handle.engine.engine_core.engine_core
    assert isinstance(core.scheduler.schedule.__self__, DecodeSteps)
    shares = [check_agreement(core, seed, asynchronous, v2=True) for seed in range(12)]
    assert max(steps for steps, _ in shares) > 0.6
    assert max(tokens for _, tokens in shares) > 0.5


def test_released_memory_is_the_trainers_and_outputs_stay(engine):
    before = engine.generate(prompts(1), GREEDY)
    size = engine.ledger.record("here").kv_cache
    free = torch.cuda.mem_get_info()[0]
    with engine.standby():
        assert torch.cuda.mem_get_info()[0] - free > size - TOLERANCE
        # All of it and more than was free before, filled with what would be NaN in bf16.
        mine = torch.full((int(free + size * 0.9),), 255, dtype=torch.uint8, device="cuda")
        assert int(mine[-1]) == 255
        del mine  # the allocator keeps it; waking takes it back
    assert engine.generate(prompts(1), GREEDY) == before
    assert not engine.ledger.problems


def test_no_growth_over_100_cycles(engine):
    engine.generate(prompts(2), GREEDY)
    for _ in range(100):
        with engine.standby():
            torch.empty(GiB, dtype=torch.uint8, device="cuda")
    engine.generate(prompts(2), GREEDY)
    # From the second on: PyTorch's allocator keeps what the first cycle allocated.
    free = [entry.free for entry in engine.ledger.entries("release")[-99:]]
    assert free[0] - free[-1] < TOLERANCE
    assert not engine.ledger.problems


def test_wake_without_room_names_the_trainer_and_can_be_repeated(engine):
    before = engine.generate(prompts(3), GREEDY)
    hoard = []
    standby = engine.standby()
    standby.__enter__()
    torch.cuda.empty_cache()  # else the hoard is partly made of what the allocator holds already
    free = torch.cuda.mem_get_info()[0]
    hoard.append(torch.empty(free - GiB, dtype=torch.uint8, device="cuda"))  # the cache is 2 GiB
    try:
        with pytest.raises(WakeError, match="the trainer's tensors"):
            standby.__exit__(None, None, None)
    finally:
        hoard.clear()  # a failure keeps this frame, and with it the memory of all later tests
    engine.wake()
    assert engine.generate(prompts(3), GREEDY) == before


def test_the_trainer_keeps_expandable_segments(engine):
    """Only where they are on: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``."""
    import os

    if "expandable_segments:True" not in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""):
        pytest.skip("expandable segments are off")
    mine = torch.empty(3 * GiB, dtype=torch.uint8, device="cuda")
    segments = [s for s in torch.cuda.memory_snapshot() if s["address"] <= mine.data_ptr()]
    holding = max(segments, key=lambda s: s["address"])
    assert holding["is_expandable"]


def test_shared_weights_agree_and_an_update_is_seen(engine, shared):
    model, report = shared
    assert report.complete, str(report)
    groups = engine.generate(prompts(4), SamplingParams(max_tokens=24))
    drift = [
        (torch.tensor(one.logprobs) - reference_on_gpu(model, one)).abs().mean()
        for (one,) in groups
    ]
    assert float(torch.stack(drift).mean()) < 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02)
    engine.update_weights(policy_version=engine.policy_version + 1)
    after = engine.generate(prompts(4), GREEDY)
    assert [one.token_ids for (one,) in after] != [one.token_ids for (one,) in groups]


def reference_on_gpu(model, completion):
    with torch.device("cuda"):
        return reference_logprobs(model, completion).cpu()


@pytest.mark.parametrize("route", ["fold", "slots"])
def test_adapters(engine, shared, route):
    model = lora(shared[0], r=8, alpha=16, seed=0).eval()
    engine.attach(model, route=route)
    zero = engine.generate(prompts(5), GREEDY)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    engine.update_lora(policy_version=engine.policy_version + 1)
    groups = engine.generate(prompts(5), SamplingParams(max_tokens=24))
    drift = [
        (torch.tensor(one.logprobs) - reference_on_gpu(model, one)).abs().mean()
        for (one,) in groups
    ]
    assert float(torch.stack(drift).mean()) < 0.03
    assert engine.generate(prompts(5), GREEDY) != zero
    model.unload()
    engine.attach(shared[0])


def test_memory_that_another_takes_meanwhile_ends_nothing(engine, monkeypatch):
    """Until 0.32 vLLM itself checks what the whole device has free, as soon as it has slept."""
    if hasattr(engine._handle.llm, "release_kv_cache_memory"):
        pytest.skip("this vLLM does not look")
    before, taken = engine.generate(prompts(4), GREEDY), []
    backend = door.KvOnlyBackend
    suspend = backend.suspend

    def beside_another(self, level=1):
        suspend(self, level)
        taken.append(torch.empty(3 * GiB, dtype=torch.uint8, device="cuda"))  # the cache has two

    monkeypatch.setattr(backend, "suspend", beside_another)
    with engine.standby():
        assert "another process took the rest" in engine.ledger.problems.pop()
        taken.clear()
        torch.cuda.empty_cache()
    assert engine.generate(prompts(4), GREEDY) == before
