"""Engines one after another in one process: each has what its own options say.

Over a double of vLLM's registry and of its cached choice; ``test_attention_choice.py`` has the
real ones.
"""

import functools
import logging
import types

import pytest

from fxrl.engines.vllm import decode_attention
from fxrl.engines.vllm.build import EngineLoadError
from fxrl.engines.vllm.decode_attention import AUTO_CONTEXT, AUTO_ROWS, most_rows, place, registered
from fxrl.engines.vllm.options import VllmOptions

HOPPER = (9, 0)
AUTO = VllmOptions(max_model_len=2048)
THEIRS = VllmOptions(max_model_len=2048, decode_attention="vllm")
LONG = VllmOptions(max_model_len=AUTO_CONTEXT + 1)
FORCED = VllmOptions(max_model_len=AUTO_CONTEXT + 1, decode_attention="fxrl")


class Member:
    def __init__(self, name, overrides, own):
        self.name, self.overrides, self.own = name, overrides, own

    def is_overridden(self):
        return self in self.overrides

    def get_path(self):
        if not (path := self.overrides.get(self, self.own)):
            raise ValueError(f"{self.name} must be registered before use")
        return path

    def clear_override(self):
        self.overrides.pop(self, None)


class Vllm:
    """Its registry, and ``choose``, which it caches for the life of the process."""

    def __init__(self):
        self.overrides = {}
        own = {"FLASH_ATTN": "vllm.flash", "CUSTOM": None}
        self.members = {name: Member(name, self.overrides, path) for name, path in own.items()}
        self.selector = types.SimpleNamespace()
        setattr(self.selector, decode_attention.CACHE, functools.cache(self._choose))

    def register(self, member, path):
        self.overrides[member] = path

    def _choose(self, name):
        return self.members[name].get_path()

    def engine(self, options):
        """The path of the backend that the engine's layers take and keep."""
        name = place(options, HOPPER)
        cached = getattr(self.selector, decode_attention.CACHE)
        asked = "CUSTOM" if options.decode_attention == "fxrl" else "FLASH_ATTN"
        if name is None:
            return cached(asked)
        with registered(self.members[name], f"fxrl.{name}", self.register, self.selector):
            return cached(asked)


@pytest.mark.parametrize(
    "order",
    [
        [AUTO, THEIRS],
        [THEIRS, AUTO],
        [AUTO, LONG],
        [LONG, AUTO, AUTO, THEIRS],
        [FORCED, AUTO, FORCED, LONG],
    ],
    ids=lambda order: "-".join(f"{o.decode_attention}{o.max_model_len}" for o in order),
)
def test_each_engine_has_what_its_own_options_say(order):
    vllm = Vllm()
    wanted = {id(AUTO): "fxrl.FLASH_ATTN", id(FORCED): "fxrl.CUSTOM"}
    for options in order:
        assert vllm.engine(options) == wanted.get(id(options), "vllm.flash")
        assert not vllm.overrides


def test_a_build_that_fails_leaves_nothing():
    vllm = Vllm()
    flash, cached = vllm.members["FLASH_ATTN"], getattr(vllm.selector, decode_attention.CACHE)
    chosen = []

    def build():
        chosen.append(cached("FLASH_ATTN"))
        raise ZeroDivisionError

    with (
        pytest.raises(ZeroDivisionError),
        registered(flash, "fxrl.FLASH_ATTN", vllm.register, vllm.selector),
    ):
        build()
    assert chosen == ["fxrl.FLASH_ATTN"]
    assert cached("FLASH_ATTN") == "vllm.flash"
    assert not vllm.overrides


def test_what_others_have_registered_stays_theirs(caplog):
    vllm = Vllm()
    before = {vllm.members["FLASH_ATTN"]: "other.Flash", vllm.members["CUSTOM"]: "other.Custom"}
    vllm.overrides.update(before)
    assert vllm.engine(FORCED) == "fxrl.CUSTOM"
    assert vllm.overrides == before
    with caplog.at_level(logging.WARNING):
        assert vllm.engine(AUTO) == "other.Flash"
    assert "other.Flash stands in" in caplog.text
    assert vllm.overrides == before


def test_a_vllm_without_the_cache_is_an_error_that_names_it():
    vllm = Vllm()
    delattr(vllm.selector, decode_attention.CACHE)
    with (
        pytest.raises(EngineLoadError, match=r"selector\._cached_get_attn_backend.*='vllm'"),
        registered(vllm.members["CUSTOM"], "fxrl.CUSTOM", vllm.register, vllm.selector),
    ):
        pytest.fail("built")
    assert not vllm.overrides


def test_unasked_a_vllm_without_the_cache_keeps_its_own_attention(caplog):
    vllm = Vllm()
    delattr(vllm.selector, decode_attention.CACHE)
    flash = vllm.members["FLASH_ATTN"]
    with registered(flash, "fxrl.FLASH_ATTN", vllm.register, vllm.selector):
        assert flash.get_path() == "vllm.flash"
    assert "decodes with vLLM's own" in caplog.text


@pytest.mark.parametrize(("graphs", "rows"), [(None, 200), ([1, 8], 200), ([512, 256], 512)])
def test_rows_of_a_step(graphs, rows):
    config = types.SimpleNamespace(
        compilation_config=types.SimpleNamespace(cudagraph_capture_sizes=graphs),
        scheduler_config=types.SimpleNamespace(max_num_seqs=200),
    )
    assert most_rows("CUSTOM", lambda: config) == rows
    assert most_rows("FLASH_ATTN", lambda: config) == AUTO_ROWS
