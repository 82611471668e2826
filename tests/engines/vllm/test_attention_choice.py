"""Engines one after another, and at once, on vLLM's own registry and its own cached choice.

On a CPU vLLM has no place for FlashAttention in an engine: there the place is ``CPU_ATTN``, and
fxrl's backend is built from vLLM's classes for it.

By its name this file comes before those that use the session's engine: closing any engine ends what
all engines of a process share in vLLM (its process groups), and the open ones cannot generate then.
"""

import functools
import gc
import sys
import types
import weakref

import pytest
import torch

from fxrl.engines import SamplingParams
from fxrl.engines.vllm import decode_attention, door
from fxrl.engines.vllm.decode_attention import AUTO_ROWS, make_backend
from tests.engines.conftest import MAX_MODEL_LEN, build_engine

pytestmark = pytest.mark.vllm

GREEDY = SamplingParams(temperature=0, max_tokens=3)


@pytest.fixture(scope="module", autouse=True)
def _vllm(vllm_process):
    """Every test here imports vLLM."""


class Scratch:
    """Stands for ``DecodeWorkspace``, which needs Triton."""

    made: weakref.WeakSet = weakref.WeakSet()

    def __init__(self, *args, **kwargs):
        Scratch.made.add(self)


@pytest.fixture
def choose(monkeypatch):
    """vLLM's choice of a decoder layer's backend, on a platform that takes FlashAttention."""
    from vllm.platforms import current_platform
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def flash(*args, **kwargs):
        return AttentionBackendEnum.FLASH_ATTN.get_path()

    attention = types.ModuleType("fxrl.kernels.decode_attention")
    attention.decode_attention = None
    schedule = types.ModuleType("fxrl.kernels.decode_schedule")
    schedule.DecodeWorkspace, schedule.schedule_decode = Scratch, None
    for stand_in in (attention, schedule):
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    monkeypatch.setattr(type(current_platform), "get_attn_backend_cls", flash)
    cached = selector._cached_get_attn_backend
    cached.cache_clear()
    config = selector.AttentionSelectorConfig(64, torch.bfloat16, "auto", None)
    yield lambda: cached(None, config)
    cached.cache_clear()


def test_vllms_choice_is_fxrls_during_the_build_alone(choose):
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    assert choose() is FlashAttentionBackend  # cached now
    with door._registered("FLASH_ATTN"):
        first = choose()
        assert issubclass(first, FlashAttentionBackend)
        assert first is AttentionBackendEnum.FLASH_ATTN.get_class() is not FlashAttentionBackend
        assert first.full_cls_name() == (door.__name__, "DecodeFLASH_ATTN")
    assert not AttentionBackendEnum.FLASH_ATTN.is_overridden()
    assert choose() is FlashAttentionBackend
    with door._registered("FLASH_ATTN"):
        assert choose() is not first  # an engine of its own has classes of its own
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None


def test_the_forced_place_is_empty_again():
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    assert not custom.is_overridden()
    with door._registered("CUSTOM"):
        assert custom.get_path() == f"{door.__name__}.DecodeCUSTOM"
    assert not custom.is_overridden()


def test_another_vllm_is_an_error_that_says_what_is_missing(monkeypatch):
    from vllm.v1.attention import selector

    monkeypatch.delattr(selector, decode_attention.CACHE)
    with (
        pytest.raises(door.EngineLoadError, match=r"no vllm.*\._cached_get_attn_backend"),
        door._registered("CUSTOM"),
    ):
        pytest.fail("built")
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    with (
        pytest.raises(door.EngineLoadError, match=r"registry.*decode_attention='vllm'"),
        door._registered("CUSTOM"),
    ):
        pytest.fail("built")


@pytest.fixture
def place_on_cpu(monkeypatch):
    """``decode_attention.place`` as on Hopper, with ``CPU_ATTN`` for FlashAttention's place."""
    from vllm.v1.attention.backends import cpu_attn

    real, lookup = decode_attention.place, door.__getattr__

    @functools.cache
    def backend(place, rows):
        classes = (
            cpu_attn.CPUAttentionBackend,
            cpu_attn.CPUAttentionBackendImpl,
            cpu_attn.CPUAttentionMetadataBuilder,
        )
        graphs = cpu_attn.CPUAttentionMetadataBuilder._cudagraph_support
        made = make_backend(*classes, graphs, None, None, Scratch, max_rows=rows, name=place)
        made.__module__, made.__qualname__ = door.__name__, f"Decode{place}"
        return made

    def place(options, capability):
        assert capability is None  # no GPU here
        return "CPU_ATTN" if real(options, (9, 0)) else None

    def found(name):
        return backend("CPU_ATTN", AUTO_ROWS) if name == "DecodeCPU_ATTN" else lookup(name)

    monkeypatch.setattr(decode_attention, "place", place)
    monkeypatch.setattr(decode_attention, "AUTO_CONTEXT", MAX_MODEL_LEN - 1)
    monkeypatch.setattr(door, "_attention_backend", backend)
    monkeypatch.setattr(door, "__getattr__", found)
    # Every step is then vLLM's, for there is no kernel here.
    monkeypatch.setattr(cpu_attn.CPUAttentionMetadata, "use_cascade", True, raising=False)


def backend_of(engine):
    config = engine._handle.engine.vllm_config.compilation_config
    (backend,) = {layer.get_attn_backend() for layer in config.static_forward_context.values()}
    return backend


def is_fast(engine):
    return backend_of(engine).__name__ == "FastBackend"


SHORT = {"max_model_len": MAX_MODEL_LEN - 1}


def test_engines_one_after_another(checkpoint, place_on_cpu):
    order = [(SHORT | {"decode_attention": "vllm"}, False), (SHORT, True), ({}, False)]
    answers = []
    for options, fast in order:
        engine = build_engine(checkpoint, **options)
        assert is_fast(engine) is fast
        assert len(Scratch.made) == fast  # one for all layers of equal heads
        answers.append(engine.generate([[5, 6]], GREEDY)[0][0].token_ids)
        engine.close()
        assert not Scratch.made  # although ``engine`` is still here
    assert len(set(map(tuple, answers))) == 1


def test_engines_at_once(checkpoint, place_on_cpu):
    first = build_engine(checkpoint, **SHORT)
    second = build_engine(checkpoint, **SHORT, decode_attention="vllm")
    third = build_engine(checkpoint, **SHORT)
    assert [is_fast(one) for one in (first, second, third)] == [True, False, True]
    assert backend_of(first) is not backend_of(third)
    assert len(Scratch.made) == 2  # calls of two engines may overlap
    answers = [one.generate([[5, 6]], GREEDY)[0][0].token_ids for one in (first, second, third)]
    assert answers[0] == answers[1] == answers[2]
    for engine, left in ((first, 1), (second, 1), (third, 0)):
        engine.close()
        assert len(Scratch.made) == left
