"""Options: what is refused and how it is said, and what vLLM is given; no vLLM needed."""

import pytest

from fxrl.engines import EngineError
from fxrl.engines.vllm.options import (
    OWNED_ENGINE_ARGS,
    VllmOptionError,
    VllmOptions,
    check_names,
    engine_arguments,
)
from fxrl.errors import ConfigError

KNOWN = {
    *("model", "seed", "dtype", "max_num_seqs", "max_model_len", "max_num_batched_tokens"),
    *("kv_cache_dtype", "tensor_parallel_size", "enforce_eager", "enable_prefix_caching"),
    *("logprobs_mode", "generation_config", "distributed_executor_backend", "block_size"),
    *("skip_tokenizer_init", "disable_log_stats", "worker_cls", "use_tqdm_on_load", "swap_space"),
    *("enable_sleep_mode", "gpu_memory_utilization", "kv_cache_memory_bytes", "quantization"),
    *("async_scheduling", "attention_config", "compilation_config"),
    *("enable_lora", "max_loras", "max_lora_rank", "enable_chunked_prefill"),
}


def arguments(options=None, known=KNOWN, **given):
    defaults = {
        "model": "/m",
        "seed": 3,
        "device": "cuda",
        "utilization": 0.5,
        "worker_cls": "a.B",
        "has_tokenizer": False,
    }
    return engine_arguments(options or VllmOptions(), known, **defaults | given)


def test_of_several_ranks_each_has_an_engine(monkeypatch):
    """vLLM's ``external_launcher`` takes the rank's GPU and joins the group that there is."""
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    assert arguments()["distributed_executor_backend"] == "external_launcher"
    with pytest.raises(VllmOptionError, match=r"tensor_parallel_size is above 1.*leave it out"):
        arguments(VllmOptions(tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs=0 is below 1"),
        ({"max_model_len": 0}, r"max_model_len=0"),
        ({"max_lora_rank": True}, r"max_lora_rank=True"),
        ({"tensor_parallel_size": 1.5}, r"tensor_parallel_size=1\.5"),
        ({"gpu_memory": "75 apples"}, r"gpu_memory='75 apples' is not a size"),
        ({"trainer_reserve": -1}, r"trainer_reserve=-1 is negative"),
        ({"generate_timeout_s": 0}, r"generate_timeout_s=0.0 must be above 0; use None"),
        ({"log_level": "loud"}, r"log_level='loud' is not one of 'DEBUG'"),
        ({"engine_args": 3}, r"engine_args=3 is not a table"),
        ({"engine_args": {"max_num_seqs": 3}}, r"'max_num_seqs' is an option of its own"),
        ({"engine_args": {"gpu_memory_utilization": 0.9}}, r"set gpu_memory or trainer_reserve"),
        ({"engine_args": {"logprobs_mode": "raw"}}, r"'logprobs_mode' is fxrl's own: the trainer"),
    ],
)
def test_bad_options_are_named_with_reason_and_cure(bad, message):
    with pytest.raises(ConfigError, match=message):
        VllmOptions(**bad)


def test_every_owned_argument_is_refused():
    for name in OWNED_ENGINE_ARGS:
        with pytest.raises(VllmOptionError, match=f"'{name}' is fxrl's own"):
            VllmOptions(engine_args={name: 1})


def test_an_option_error_is_both_an_engines_and_a_configurations():
    assert issubclass(VllmOptionError, EngineError)
    assert issubclass(VllmOptionError, ConfigError)


def test_unknown_engine_arguments_name_the_nearest():
    options = VllmOptions(engine_args={"blok_size": 32})
    with pytest.raises(VllmOptionError, match=r"no 'blok_size'; did you mean 'block_size'"):
        arguments(options)


def test_an_argument_that_an_older_vllm_lacks_is_refused():
    with pytest.raises(VllmOptionError, match="no 'use_tqdm_on_load'"):
        arguments(known=KNOWN - {"use_tqdm_on_load"})


def test_check_names_is_silent_where_all_are_known():
    check_names("here", ["a", "b"], {"a", "b", "c"})


def test_what_vllm_is_given_on_a_gpu():
    options = VllmOptions(
        max_model_len=2304,
        max_num_seqs=32,
        kv_cache_dtype="fp8",
        quantization="fp8_per_channel",
        attention_config={"backend": "FLASH_ATTN"},
        compilation_config=2,
        max_lora_rank=16,
        engine_args={"block_size": 32},
    )
    given = arguments(options, has_tokenizer=True)
    expected = {
        "max_model_len": 2304,
        "max_num_seqs": 32,
        "kv_cache_dtype": "fp8",
        "quantization": "fp8_per_channel",
        "attention_config": {"backend": "FLASH_ATTN"},
        "compilation_config": 2,
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "block_size": 32,
        "gpu_memory_utilization": 0.5,
        "enable_sleep_mode": True,
        "logprobs_mode": "processed_logprobs",
        "skip_tokenizer_init": False,
        "distributed_executor_backend": "uni",
        "worker_cls": "a.B",
    }
    assert expected.items() <= given.items()
    assert not {"max_num_batched_tokens", "async_scheduling", "kv_cache_memory_bytes"} & set(given)


def test_without_standby_vllm_allocates_as_usual():
    assert "enable_sleep_mode" not in arguments(VllmOptions(standby=False))


def test_on_a_cpu_the_cache_has_a_size_of_its_own():
    given = arguments(VllmOptions(cpu_kv_cache="2GiB"), device="cpu")
    assert given["kv_cache_memory_bytes"] == 2 * 2**30
    assert given["enable_chunked_prefill"] is False, "seeded requests end where prompts are cut"
    assert not {"gpu_memory_utilization", "enable_sleep_mode", "enable_lora"} & set(given)


def test_several_ranks_have_processes_of_their_own():
    given = arguments(VllmOptions(tensor_parallel_size=2))
    assert given["distributed_executor_backend"] == "mp"
