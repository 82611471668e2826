"""Sampling parameters, seeds and the loop around vLLM's engine, on an engine that is made up."""

import itertools
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fxrl.engines import EngineError, GenerateTimeoutError, PromptError, SamplingParams
from fxrl.engines.engine import SamplingParamsError
from fxrl.engines.vllm.options import VllmOptionError
from fxrl.engines.vllm.requests import (
    OWNED_SAMPLING,
    EngineFailedError,
    Gather,
    Sampled,
    completion,
    run_requests,
    sample_seed,
    sampling_arguments,
)

KNOWN = {
    *("n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed"),
    *("stop_token_ids", "ignore_eos", "logprobs", "detokenize", "skip_clone", "flat_logprobs"),
    *("repetition_penalty", "logit_bias", "_all_stop_token_ids"),
}


def arguments(known=KNOWN, **params):
    return sampling_arguments(SamplingParams(**params), known, frozenset([2, 9]))


def test_eos_are_stop_tokens_of_ours():
    assert arguments(stop_token_ids=(4,))["stop_token_ids"] == [2, 4, 9]
    assert arguments(stop_token_ids=(4,), ignore_eos=True)["stop_token_ids"] == [4]
    assert arguments()["ignore_eos"] is True


def test_what_every_request_has():
    given = arguments(temperature=0, top_k=3, extra={"repetition_penalty": 1.2})
    expected = {"logprobs": 0, "detokenize": False, "top_k": 3, "repetition_penalty": 1.2}
    assert expected.items() <= given.items()
    assert not {"n", "seed"} & given.keys()


@pytest.mark.parametrize("name", OWNED_SAMPLING)
def test_owned_parameters_are_refused_with_the_reason(name):
    with pytest.raises(VllmOptionError, match=f"'{name}' is fxrl's own: "):
        arguments(extra={name: 1})


@pytest.mark.parametrize("name", ["_all_stop_token_ids", "logit_bais", "nonsense"])
def test_unknown_parameters_are_refused(name):
    with pytest.raises(VllmOptionError, match=f"knows no '{name}'"):
        arguments(extra={name: 1})


@pytest.mark.parametrize("temperature", [1e-5, 0.0099])
def test_temperatures_that_vllm_would_change_are_refused(temperature):
    with pytest.raises(SamplingParamsError, match="use 0 for greedy"):
        arguments(temperature=temperature)
    assert arguments(temperature=0.01)["temperature"] == 0.01


def test_seeds_are_all_different_and_spread():
    seeds = {sample_seed(b, c, i) for b in range(5) for c in range(20) for i in range(100)}
    assert len(seeds) == 5 * 20 * 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    share = sum(bin(seed).count("1") for seed in seeds) / 63 / len(seeds)
    assert share == pytest.approx(0.5, abs=0.01)


def sampled(finish_reason="length"):
    return Sampled(0, [5, 6], [-5.0, -6.0], finish_reason)


def test_completions_of_what_was_drawn():
    made = completion((1,), sampled(), 3)
    assert (made.token_ids, made.logprobs) == ((5, 6), (-5.0, -6.0))
    assert (made.finish_reason, made.policy_version) == ("length", 3)


def test_an_end_that_is_none_of_ours_is_an_error():
    with pytest.raises(EngineError, match="ended a completion of 2 tokens with 'abort'"):
        completion((1,), sampled("abort"), 0)


def output(name, token_ids, finish_reason=None):
    logprobs = np.array([[-float(token), -1.0] for token in token_ids])  # the sampled one, the best
    return SimpleNamespace(
        request_id=name,
        new_token_ids=token_ids,
        new_logprobs=SimpleNamespace(logprobs=logprobs),
        finish_reason=finish_reason,
    )


class FakeEngine:
    """Draws two tokens for one request in two steps, the last request first, so out of order."""

    def __init__(self, fail_at=None, refuse=None):
        self.waiting, self.aborted, self.steps = [], [], 0
        self.fail_at, self.refuse = fail_at, refuse
        self.engine_core = SimpleNamespace(get_output=self.get_output)

    def add_request(self, name, prompt, params, lora_request=None):
        if self.refuse is not None and len(self.waiting) == self.refuse:
            raise ValueError("no such thing")
        self.waiting.append((f"{name}-own", prompt, params, lora_request))
        return f"{name}-own"

    def get_output(self):
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("device lost")
        name, prompt, params, _ = self.waiting[-1]
        others = [output("of-an-aborted-call", [3], "abort")]
        if self.steps % 2:
            return SimpleNamespace(outputs=[*others, output(name, [prompt])])
        self.waiting.pop()
        return SimpleNamespace(outputs=[output(name, [params], "length"), *others])

    def abort_request(self, names, internal):
        assert internal
        self.aborted += [name for name, *_ in self.waiting if name in names]
        self.waiting.clear()
        self.known = names


REQUESTS = {i: (10 + i, 20 + i) for i in range(4)}


def run(engine, **given):
    gather = Gather([(1,), (2,)], 2, 0, given.pop("on_finished", None))
    run_requests(engine, REQUESTS, finished=gather, tag="7-", **given)
    return gather


def test_results_are_in_order_however_they_end():
    engine = FakeEngine()
    groups = run(engine, lora_request="adapter").all()
    assert [[one.token_ids for one in group] for group in groups] == [
        [(10, 20), (11, 21)],
        [(12, 22), (13, 23)],
    ]
    assert [[one.prompt_token_ids for one in group] for group in groups] == [[(1,)] * 2, [(2,)] * 2]
    assert groups[0][1].logprobs == (-11.0, -21.0)
    assert engine.known == [f"7-{at}-own" for at in range(4)], "the processor forgets all of them"


def test_a_prompt_without_requests_has_no_completions():
    gather = Gather([(1,), (2,)], 2, 0, None)
    part = {i: REQUESTS[i] for i in (2, 3)}
    run_requests(FakeEngine(), part, finished=gather)
    assert [len(group) for group in gather.all()] == [0, 2]


def test_a_group_is_told_when_its_last_is_there():
    told = []
    groups = run(FakeEngine(), on_finished=lambda i, group: told.append((i, group))).all()
    assert told == [(1, groups[1]), (0, groups[0])]


def test_the_time_limit_aborts_what_still_runs():
    engine, clock = FakeEngine(), itertools.count(step=10)
    with pytest.raises(GenerateTimeoutError, match=r"2 of 4 completions were not done after 35 s"):
        run(engine, timeout_s=35.0, clock=lambda: float(next(clock)))
    assert engine.aborted == ["7-0-own", "7-1-own"]


def test_a_call_that_ends_in_time_is_never_late():
    clock = itertools.count(step=10)
    run(FakeEngine(), timeout_s=75.0, clock=lambda: float(next(clock)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_the_callback_raises_leaves_no_request_behind(error):
    def stop(index, group):
        raise error

    engine = FakeEngine()
    with pytest.raises(error):
        run(engine, on_finished=stop)
    assert engine.aborted == ["7-0-own", "7-1-own"]


def test_a_refused_request_takes_the_others_back():
    engine = FakeEngine(refuse=2)
    with pytest.raises(PromptError, match="vLLM refuses the request: no such thing"):
        run(engine)
    assert {"7-0-own", "7-1-own"} <= set(engine.aborted)


def test_a_failing_engine_is_not_touched_again():
    engine = FakeEngine(fail_at=3)
    with pytest.raises(EngineFailedError, match=r"RuntimeError: device lost.*untouched"):
        run(engine)
    assert engine.steps == 3
    assert not engine.aborted


def test_a_step_that_does_not_return_is_reported(monkeypatch, caplog):
    monkeypatch.setattr("fxrl.engines.vllm.requests.GRACE_S", 0.05)
    engine = FakeEngine()
    real = engine.get_output
    engine.engine_core.get_output = lambda: time.sleep(0.1) or real()
    with pytest.raises(GenerateTimeoutError):
        run(engine, timeout_s=0.01)
    assert "the GPU or its driver hangs" in caplog.text


def test_a_call_that_ends_leaves_no_watchdog(monkeypatch):
    before = set(threading.enumerate())
    run(FakeEngine(), timeout_s=100.0)
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()
