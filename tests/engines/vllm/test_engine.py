"""The real vLLM, on the CPU: sampling, log-probabilities, seeds, limits, updates by copy."""

import math
import random

import pytest
import torch

from fxrl.engines import (
    Engine,
    EngineError,
    GenerateTimeoutError,
    PromptError,
    SamplingParams,
)
from fxrl.engines.engine import SamplingParamsError
from fxrl.engines.vllm.options import VllmOptionError, VllmOptions
from fxrl.engines.vllm.requests import EngineFailedError
from fxrl.models import lora
from tests.engines.conftest import MAX_MODEL_LEN, assert_agrees, build_engine, fresh_model

pytestmark = pytest.mark.vllm


def random_prompts(seed, count=5):
    draw = random.Random(seed)
    return [[draw.randrange(3, 300) for _ in range(draw.randrange(1, 20))] for _ in range(count)]


def tokens(groups):
    return [[one.token_ids for one in group] for group in groups]


@pytest.fixture
def attached(engine, checkpoint):
    """The engine after ``attach``; afterwards it serves the checkpoint again."""
    model = fresh_model(checkpoint)
    yield engine, model
    base = fresh_model(checkpoint)
    engine.attach(base)
    engine.update_weights(policy_version=engine.policy_version)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7, 1.6])
def test_logprobs_are_the_models_own(engine, checkpoint, temperature):
    prompts = random_prompts(seed=int(temperature * 10))
    groups = engine.generate(prompts, SamplingParams(n=3, max_tokens=9, temperature=temperature))
    assert [len(group) for group in groups] == [3] * len(prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        assert {one.prompt_token_ids for one in group} == {tuple(prompt)}
    assert_agrees(fresh_model(checkpoint), groups, temperature)


def test_greedy_takes_the_most_likely_token(engine, checkpoint):
    model = fresh_model(checkpoint)
    for group in engine.generate(random_prompts(3), SamplingParams(temperature=0, max_tokens=6)):
        ids = torch.tensor([group[0].prompt_token_ids + group[0].token_ids])
        with torch.no_grad():
            best = model(input_ids=ids).logits[0].argmax(-1)
        start = len(group[0].prompt_token_ids)
        assert best[start - 1 : -1].tolist() == list(group[0].token_ids)


def test_samples_of_a_prompt_differ_and_follow_the_distribution(engine, checkpoint):
    """One token each: the counts of 2000 draws against the model's probabilities."""
    prompt = [5, 9, 77]
    (group,) = engine.generate([prompt], SamplingParams(n=2000, max_tokens=1, seed=3))
    with torch.no_grad():
        logits = fresh_model(checkpoint)(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = logits.softmax(-1) * len(group)
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in group]), minlength=320)
    likely = expected > 5
    chi2 = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    degrees = int(likely.sum())
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees)


def test_filters_report_the_distribution_that_was_drawn_from(engine, checkpoint):
    params = SamplingParams(max_tokens=4, top_k=5, temperature=0.9)
    model = fresh_model(checkpoint)
    for group in engine.generate(random_prompts(4), params):
        one = group[0]
        ids = torch.tensor([one.prompt_token_ids + one.token_ids])
        start = len(one.prompt_token_ids)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, start - 1 : -1] / 0.9
        kept = logits.topk(5, -1).values.logsumexp(-1)
        drawn = logits.gather(-1, ids[0, start:, None])[:, 0] - kept
        torch.testing.assert_close(torch.tensor(one.logprobs), drawn, atol=1e-3, rtol=0)


def test_stop_tokens_stay_and_min_tokens_hold_them_back(engine):
    prompts = random_prompts(5, count=8)
    free = engine.generate(prompts, SamplingParams(max_tokens=12, seed=1))
    stop = free[0][0].token_ids[2]
    params = SamplingParams(max_tokens=12, seed=1, stop_token_ids=(stop,))
    one = engine.generate(prompts, params)[0][0]
    assert one.finish_reason == "stop"
    assert one.token_ids == free[0][0].token_ids[: one.token_ids.index(stop) + 1]
    held = SamplingParams(max_tokens=12, seed=1, stop_token_ids=(stop,), min_tokens=5)
    assert all(stop not in g[0].token_ids[:5] for g in engine.generate(prompts, held))


def test_eos_ends_a_completion_unless_ignored(engine, checkpoint):
    """EOS is the engine's argument; greedy decoding of a prompt that leads to it is made by it."""
    greedy = engine.generate([[8, 9]], SamplingParams(temperature=0, max_tokens=8))[0][0]
    eos = greedy.token_ids[3]
    old, engine.eos_token_ids = engine.eos_token_ids, frozenset([eos])
    try:
        short = engine.generate([[8, 9]], SamplingParams(temperature=0, max_tokens=8))[0][0]
        long = engine.generate(
            [[8, 9]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        )[0][0]
    finally:
        engine.eos_token_ids = old
    assert short.finish_reason == "stop"
    assert short.token_ids == greedy.token_ids[: greedy.token_ids.index(eos) + 1]
    assert long.token_ids == greedy.token_ids


def test_a_seed_draws_the_same_whatever_else_is_drawn(engine):
    params = SamplingParams(n=2, max_tokens=8, seed=11)
    first = engine.generate([[5, 6], [7, 8]], params)
    engine.generate(random_prompts(6), SamplingParams(max_tokens=3))
    assert tokens(engine.generate([[5, 6], [7, 8], [9]], params))[:2] == tokens(first)
    empty, second = engine.generate([[5, 6], [7, 8]], params, only=[1])
    assert empty == []
    assert tokens([second]) == tokens(first)[1:]
    assert first[0][0].token_ids != first[0][1].token_ids


def test_resume_draws_the_same(engine):
    params = SamplingParams(n=2, max_tokens=8)
    state = engine.state_dict()
    first = [tokens(engine.generate([[5, 6], [7, 8]], params)) for _ in range(2)]
    assert first[0] != first[1]
    engine.load_state_dict(state)
    assert [tokens(engine.generate([[5, 6], [7, 8]], params)) for _ in range(2)] == first
    with pytest.raises(EngineError, match="lacks calls"):
        engine.load_state_dict({"policy_version": 0, "seed": 0})


def test_vllms_own_sampling_parameters_pass_through(engine):
    params = SamplingParams(max_tokens=6, extra={"allowed_token_ids": [41, 42]})
    drawn = {t for g in engine.generate(random_prompts(7), params) for t in g[0].token_ids}
    assert drawn <= {41, 42}


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (
            {"extra": {"repetition_penality": 1.1}},
            VllmOptionError,
            "mean 'repetition_penalty'",
        ),
        ({"extra": {"logprobs": 3}}, VllmOptionError, "'logprobs' is fxrl's own"),
        ({"extra": {"top_k": 3}}, VllmOptionError, "'top_k' is a field of SamplingParams"),
        ({"extra": {"repetition_penalty": -1.0}}, SamplingParamsError, "greater than zero"),
        ({"temperature": 0.001}, SamplingParamsError, "use 0 for greedy"),
        ({"max_tokens": MAX_MODEL_LEN}, PromptError, f"more than max_model_len={MAX_MODEL_LEN}"),
    ],
)
def test_bad_parameters_are_refused_and_lose_nothing(engine, params, error, message):
    with pytest.raises(error, match=message):
        engine.generate([[5, 6]], SamplingParams(**{"max_tokens": 4} | params))
    assert len(engine.generate([[5, 6]], SamplingParams(max_tokens=4))[0][0].token_ids) == 4


@pytest.mark.parametrize("prompt", [[], [5, 320], [-1]])
def test_bad_prompts_are_refused(engine, prompt):
    with pytest.raises(PromptError, match="prompt 1 "):
        engine.generate([[5], prompt], SamplingParams(max_tokens=2))


def test_groups_are_told_as_soon_as_they_are_there(engine):
    """The result is in order, the calls are not, and each has the very completions."""
    seen = {}
    stop = tuple(range(3, 160))  # about half of the vocabulary: lengths differ
    params = SamplingParams(n=2, max_tokens=20, seed=5, stop_token_ids=stop)
    prompts = random_prompts(8, count=9)
    groups = engine.generate(prompts, params, on_finished=seen.__setitem__)
    assert groups == [seen[index] for index in range(len(prompts))]
    assert len({len(one.token_ids) for group in groups for one in group}) > 1


def test_what_a_callback_raises_ends_the_call_and_nothing_else(engine):
    def fail(index, group):
        raise ValueError("mine")

    params = SamplingParams(n=2, max_tokens=20, seed=5)
    with pytest.raises(ValueError, match="mine"):
        engine.generate(random_prompts(9), params, on_finished=fail)
    assert not engine._handle.engine.has_unfinished_requests()
    expected = tokens(engine.generate([[5]], params))
    assert tokens(engine.generate([[5]], params)) == expected


def test_a_time_limit_aborts_and_the_engine_goes_on(engine, monkeypatch):
    monkeypatch.setattr(engine, "options", VllmOptions(generate_timeout_s=1e-3))
    with pytest.raises(GenerateTimeoutError, match=r"not done after 0\.001 s"):
        engine.generate(random_prompts(10), SamplingParams(max_tokens=60))
    monkeypatch.undo()
    assert not engine._handle.engine.has_unfinished_requests()
    assert len(engine.generate([[5]], SamplingParams(max_tokens=3))[0][0].token_ids) == 3


def test_standby_calls_vllm_in_order_and_the_output_is_the_same(engine, monkeypatch):
    calls = []
    llm = engine._handle.llm

    def recorded(name):
        real = getattr(llm, name)

        def record(*args, **kwargs):
            calls.append((name, *args, *kwargs.values()))
            return real(*args, **kwargs)

        return record

    for name in ("sleep", "reset_prefix_cache", "wake_up"):
        monkeypatch.setattr(llm, name, recorded(name))
    params = SamplingParams(temperature=0, max_tokens=8)
    before = engine.generate(random_prompts(11), params)
    with engine.standby():
        assert calls == [("sleep", 0), ("reset_prefix_cache",)]
        with pytest.raises(EngineError, match="is standby; leave its block"):
            engine.generate([[5]], params)
        with pytest.raises(EngineError, match="is standby"):
            engine.update_weights(policy_version=99)
    assert calls[2:] == [("wake_up", ["scheduling"])]
    assert engine.generate(random_prompts(11), params) == before
    events = [entry.event for entry in engine.ledger.entries()][-4:]
    assert events == ["before release", "release", "wake", "generate"]
    assert "standby frees nothing" in str(engine.ledger)
    assert not engine.ledger.problems


def test_wake_inside_the_block_is_enough(engine):
    with engine.standby():
        engine.wake()
        engine.generate([[5]], SamplingParams(max_tokens=2))


def test_full_weights_are_copied_where_they_cannot_be_shared(attached):
    engine, model = attached
    engine.attach(model)
    assert engine.weight_sync.way == "copy"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    version = engine.policy_version + 1
    engine.update_weights(policy_version=version)
    groups = engine.generate(random_prompts(12), SamplingParams(n=2, max_tokens=6))
    assert {one.policy_version for group in groups for one in group} == {version}
    assert_agrees(model, groups)
    with pytest.raises(EngineError, match="is older than the engine's"):
        engine.update_weights(policy_version=version - 1)


@pytest.mark.parametrize("route", ["slots", "copy"])
def test_an_adapter_follows_the_trainer(attached, route):
    """Zero B is the base; new factors are seen; the trainer's own are left alone."""
    engine, base = attached
    greedy = SamplingParams(temperature=0, max_tokens=8)
    prompts = random_prompts(13)
    plain = engine.generate(prompts, greedy)
    model = lora(base, r=4, alpha=6, seed=1).eval()
    engine.attach(model, route=route)
    assert engine.weight_sync.way == route
    zero = engine.generate(prompts, greedy)
    assert tokens(zero) == tokens(plain)
    for version in range(1, 4):  # 2 and 3 are written into a slot that vLLM has filled once
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.2)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        engine.update_lora(policy_version=engine.policy_version + 1)
        groups = engine.generate(prompts, SamplingParams(n=2, max_tokens=6, seed=version))
        assert_agrees(model, groups)
        assert tokens(engine.generate(prompts, greedy)) != tokens(plain)
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept[name]), name


def test_a_route_that_is_not_there_is_refused_with_the_reason(attached):
    engine, base = attached
    with pytest.raises(EngineError, match="base weights are not the engine's"):
        engine.attach(lora(base, r=4), route="fold")


def test_too_high_a_rank_names_the_option(attached):
    engine, base = attached
    engine.attach(lora(base, r=16), route="slots")
    with pytest.raises(EngineError, match=r"rank 16.*max_lora_rank=8"):
        engine.update_lora(policy_version=engine.policy_version)


def test_the_cache_holds_what_can_be_used_and_no_more(engine):
    blocks = engine._handle.engine.vllm_config.cache_config
    size = blocks.block_size
    assert blocks.num_gpu_blocks == 16 * -(-MAX_MODEL_LEN // size) + 1


def test_vllm_is_an_engine_and_says_what_it_is(engine):
    assert isinstance(engine, Engine)
    assert engine._standby.way == "calls only"
    assert engine._handle.model().training is False


def test_a_failure_inside_vllm_says_what_is_lost_and_the_engine_stays_refused(checkpoint):
    """And a closed engine too; one engine of its own, since it is broken here."""
    engine = build_engine(checkpoint)
    runner = engine._handle.worker.model_runner

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA error: an illegal memory access")

    runner.execute_model = broken
    with pytest.raises(EngineFailedError, match=r"illegal memory access.*untouched"):
        engine.generate([[5]], SamplingParams(max_tokens=2))
    with pytest.raises(EngineError, match="is failed; vLLM failed earlier"):
        engine.generate([[5]], SamplingParams(max_tokens=2))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="is closed; make a new one"):
        engine.generate([[5]], SamplingParams(max_tokens=2))
