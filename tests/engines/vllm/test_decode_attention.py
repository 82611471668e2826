"""Where fxrl's decode attention runs unasked, and where only if it is asked for."""

import pytest

from fxrl.engines.vllm.decode_attention import AUTO_CONTEXT, place
from fxrl.engines.vllm.options import VllmOptionError, VllmOptions

HOPPER = (9, 0)


def test_unasked_it_takes_flash_attentions_place_on_hopper():
    for kind in ("auto", "fp8"):
        options = VllmOptions(max_model_len=AUTO_CONTEXT, kv_cache_dtype=kind)
        assert place(options, HOPPER) == "FLASH_ATTN"


@pytest.mark.parametrize(
    ("changes", "capability"),
    [
        ({}, (8, 0)),
        ({}, (10, 0)),
        ({}, None),
        ({"max_model_len": None}, HOPPER),
        ({"max_model_len": AUTO_CONTEXT + 1}, HOPPER),
        ({"tensor_parallel_size": 2}, HOPPER),
        ({"kv_cache_dtype": "fp8_e5m2"}, HOPPER),
        ({"attention_config": {"backend": "FLASH_ATTN"}}, HOPPER),
        ({"engine_args": {"attention_backend": "FLASH_ATTN"}}, HOPPER),
        ({"decode_attention": "vllm"}, HOPPER),
    ],
    ids=str,
)
def test_what_was_not_measured_is_vllms(changes, capability):
    assert place(VllmOptions(**{"max_model_len": 2048} | changes), capability) is None


@pytest.mark.parametrize("capability", [HOPPER, (8, 0)])
def test_forced_it_is_a_backend_of_its_own(capability):
    assert place(VllmOptions(decode_attention="fxrl"), capability) == "CUSTOM"


def test_without_a_gpu_there_is_no_place():
    assert place(VllmOptions(decode_attention="fxrl"), None) is None


def test_other_values_are_refused():
    with pytest.raises(VllmOptionError, match="'fast' is not one of 'auto', 'vllm', 'fxrl'"):
        VllmOptions(decode_attention="fast")
