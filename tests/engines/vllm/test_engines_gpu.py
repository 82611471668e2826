"""Engines one after another on a GPU: whose decode attention each runs, and what stays.

``pytest -m 'vllm and gpu' tests/engines/vllm/test_engines_gpu.py``
"""

import gc
import traceback
import weakref

import pytest
import torch

from fxrl.engines import SamplingParams, VllmEngine, VllmOptions
from fxrl.engines.vllm import door
from fxrl.engines.vllm.build import EngineLoadError
from fxrl.engines.vllm.decode_attention import AUTO_CONTEXT
from fxrl.engines.vllm.options import HOPPER
from fxrl.models import load_model

pytestmark = [pytest.mark.vllm, pytest.mark.gpu]

POSITIONS = 2 * AUTO_CONTEXT
MODEL = (
    "tiny:qwen3:head_dim=64,hidden=256,heads=8,kv_heads=4,intermediate=512,"
    f"layers=2,positions={POSITIONS}"
)
SHORT, LONG = {"max_model_len": 512}, {"max_model_len": POSITIONS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("vllm")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    folder = tmp_path_factory.mktemp("attention")
    load_model(MODEL, "bf16")[0].save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "order",
    [
        [(SHORT, True), (SHORT | {"decode_attention": "vllm"}, False), (SHORT, True)],
        [(LONG | {"decode_attention": "fxrl"}, True), (LONG, False), (SHORT, True)],
    ],
    ids=["auto-vllm-auto", "fxrl-long-auto"],
)
def test_each_engine_runs_what_its_own_options_say_and_leaves_no_scratch(folder, order):
    if torch.cuda.get_device_capability() != HOPPER:
        pytest.skip("no GPU on which fxrl's decode attention runs unasked")
    for options, fast in order:
        given = VllmOptions(
            max_num_seqs=8,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
            **options,
        )
        engine = VllmEngine(folder, given, eos_token_ids=[2], seed=7)
        scratch = weakref.WeakSet()
        config = engine._handle.engine.vllm_config.compilation_config
        names = set()
        for layer in config.static_forward_context.values():
            names.add(layer.get_attn_backend().__name__)
            if (space := getattr(layer.impl, "fxrl_workspace", None)) is not None:
                scratch.add(space)
        del layer, config, space
        assert names == {"FastBackend" if fast else "FlashAttentionBackend"}
        assert len(scratch) == fast
        groups = engine.generate([[5, 6]] * 4, SamplingParams(max_tokens=16))
        assert len(groups) == 4
        engine.close()
        assert not scratch  # although ``engine`` is still here


def watch(model):
    """References to the weights, by name."""
    return {name: weakref.ref(value) for name, value in model.named_parameters()}


def remains(weights):
    """What is left of an engine that is gone: its weights and who holds them, vLLM's pools."""
    from vllm.device_allocator.cumem import CuMemAllocator

    gc.collect()
    torch.cuda.empty_cache()
    left = {name: ref() for name, ref in weights.items() if ref() is not None}
    lines = [f"{len(left)} of {len(weights)} weights are still there: {', '.join(left)}"]
    held, known = next(iter(left.values()), None), {id(left)}
    while held is not None:  # the way to a global, or to a frame
        others = [one for one in gc.get_referrers(held) if id(one) not in known]
        known |= {id(others), *map(id, others)}
        lines += [f"  in {type(one)} {str(one)[:120]!r}" for one in others[:4]]
        held = others[0] if others and len(known) < 40 else None
    pools = getattr(CuMemAllocator.instance, "pointer_to_data", {})
    lines += [f"pool {one.tag!r}: {one.handle[1]} bytes" for one in pools.values()]
    return "\n".join([*lines, torch.cuda.memory_summary(abbreviated=True)])


def draw(folder, options, before):
    """Builds an engine, draws, closes; returns its weights. A failure says what is in its way."""
    found = remains(before)
    try:
        engine = VllmEngine(folder, options, eos_token_ids=[2], seed=7)
    except EngineLoadError as error:
        pytest.fail(f"{''.join(traceback.format_exception(error))}\nbefore it was built:\n{found}")
    weights = watch(engine._handle.model())
    assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=4))) == 1
    engine.close()
    return weights


def test_after_a_build_that_failed_and_after_a_close_another_can_be_tried(folder, monkeypatch):
    """It fails with the weights loaded; the error is kept, as a notebook does."""
    options, weights = VllmOptions(max_num_seqs=8, **SHORT), {}

    def full(self, *args):
        weights.update(watch(self.model_runner.model))
        raise torch.OutOfMemoryError("made up")

    with monkeypatch.context() as patch:
        patch.setattr(door.Worker, "determine_available_memory", full)
        with pytest.raises(EngineLoadError, match="OutOfMemoryError: made up") as kept:
            VllmEngine(folder, options, eos_token_ids=[2], seed=7)
    for _ in range(2):
        weights = draw(folder, options, weights)
    assert kept.value.__cause__ is not None
