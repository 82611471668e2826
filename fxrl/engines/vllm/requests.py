"""One call of ``generate``: parameters as vLLM wants them, requests in, completions back.

Works on vLLM's objects as they are handed in; imports no vLLM.

NOTE [Seeds]
Each sample has its own seed, mixed from the engine's seed, the number of the call and the sample's
place in it (splitmix64's finalizer: neighbours differ in half of their bits). What a sample draws
then does not depend on which other requests are in flight, beyond the rounding of logits; a
resumed run, which restores the number of the call, draws the same. In vLLM's V2 model runner (all
dense models on a GPU) every request has a seed anyway; the older runner keeps a generator for each
seeded request, which costs a few percent of a step.

NOTE [Why not LLM.generate]
``LLM.generate`` cannot be left: a call that hangs or that the user interrupts leaves its requests
behind, which the next call would then run to their end. Here requests are added and the engine is
stepped by hand, so a call can be aborted between two steps. Each sample is a request of its own
with a seed of its own, so no parent request has to gather samples. What a step has drawn is taken
from vLLM's engine core as it is, tokens and log-probabilities: nobody here wants the text that
vLLM's output processor would look for, which took a sixth of the host's time in a step of 256
sequences. The processor knows the requests from ``add_request`` and is told to forget them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from fxrl.engines.engine import (
    Completion,
    Drawing,
    EngineError,
    GenerateTimeoutError,
    Groups,
    OnFinished,
    PromptError,
    SamplingParams,
    SamplingParamsError,
)
from fxrl.engines.vllm.options import VllmOptionError, check_names

OWNED_SAMPLING: Mapping[str, str] = MappingProxyType(
    {
        "logprobs": "every completion has the log-probability of each of its tokens",
        "prompt_logprobs": "completions have no place for them",
        "logprob_token_ids": "completions have no place for them",
        "flat_logprobs": "log-probabilities do not pass by it",
        "detokenize": "engines never see text",
        "stop": "engines never see text; give stop_token_ids",
        "include_stop_str_in_output": "engines never see text",
        "skip_special_tokens": "engines never see text",
        "spaces_between_special_tokens": "engines never see text",
        "output_text_buffer_length": "engines never see text",
        "output_kind": "generate returns finished completions",
        "skip_clone": "requests are the engine's own",
    }
)
"""vLLM's sampling parameters that fxrl sets itself, and why."""

LEAST_TEMPERATURE = 0.01
"""vLLM raises anything between 0 and this to this."""


def sampling_arguments(
    params: SamplingParams, known: Collection[str], eos_token_ids: Collection[int]
) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams``, all but the seed.

    EOS ids are passed as stop tokens: which ids end a completion is fxrl's to say, not the
    checkpoint's generation config's.
    """
    if 0 < params.temperature < LEAST_TEMPERATURE:
        raise SamplingParamsError(
            f"temperature={params.temperature!r} is above 0 and below {LEAST_TEMPERATURE}, which "
            "vLLM would sample at; use 0 for greedy"
        )
    own = {name for name in SamplingParams.__dataclass_fields__ if name != "extra"}
    for name in params.extra:
        if name in own:
            raise VllmOptionError(f"sampling extra: {name!r} is a field of SamplingParams, set it")
        if name in OWNED_SAMPLING:
            raise VllmOptionError(f"sampling extra: {name!r} is fxrl's own: {OWNED_SAMPLING[name]}")
    check_names("sampling extra", params.extra.keys(), {k for k in known if k[:1] != "_"})
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    arguments: dict[str, Any] = {
        "temperature": float(params.temperature),
        "top_p": float(params.top_p),
        "top_k": params.top_k,
        "min_p": float(params.min_p),
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,
        "logprobs": 0,  # the sampled token's alone
        "detokenize": False,
        "skip_clone": True,
    }
    arguments = {name: value for name, value in arguments.items() if name in known}
    return arguments | dict(params.extra)


def sample_seed(base: int, call: int, index: int) -> int:
    """The seed of sample number ``index`` of call number ``call``, in [0, 2**63)."""
    mixed = base
    for part in (call, index):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (part + 1)) % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
        mixed ^= mixed >> 31
    return mixed >> 1


GRACE_S = 30.0
"""The time limit is looked at between steps, of which none takes this long."""

log = logging.getLogger(__name__)

_FINISH: Mapping[str, Literal["stop", "length"]] = MappingProxyType(
    {"stop": "stop", "length": "length", "repetition": "length"}
)


class EngineFailedError(EngineError):
    """vLLM failed while it generated and cannot be used any more."""


@dataclass(slots=True)
class Sampled:
    """What one request has drawn so far."""

    number: int  # the request's
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = ""  # as vLLM names it, once it is done


def run_requests(
    engine: Any,
    requests: Mapping[int, tuple[Any, Any]],
    *,
    finished: Callable[[Sampled], None],
    tag: str = "",
    lora_request: Any = None,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs requests to their end.

    Args:
        engine: vLLM's ``LLMEngine``.
        requests: (vLLM prompt, vLLM sampling parameters), each for one completion, by number.
        finished: called with each request when it is done, in any order; what it raises ends the
            call.
        tag: starts the requests' names, to tell this call's from another's.
        lora_request: vLLM's, for all of them.
        timeout_s: after that many seconds they are aborted.
        clock: seconds.

    Raises:
        GenerateTimeoutError: the engine is as before.
        EngineFailedError: vLLM raised; whatever it was in the middle of is lost.
        PromptError: vLLM refuses a request; the engine is as before.
    """
    running: dict[str, Sampled] = {}
    names: list[str] = []
    deadline = None if timeout_s is None else clock() + timeout_s
    watchdog = _watchdog(timeout_s)
    try:
        for number, (prompt, params) in requests.items():
            names.append(_add(engine, f"{tag}{number}", prompt, params, lora_request))
            running[names[-1]] = Sampled(number)
        while running:
            for sampled in _take(step(engine), running):
                finished(sampled)
            if running and deadline is not None and clock() > deadline:
                raise GenerateTimeoutError(
                    f"generate: {len(running)} of {len(requests)} completions were not done after "
                    f"{timeout_s:g} s and were aborted; weights and trainer are as before. Raise "
                    "vllm.generate_timeout_s or lower max_tokens"
                )
    except EngineFailedError:
        names.clear()  # it is not touched again
        raise
    finally:
        if watchdog is not None:
            watchdog.cancel()
        if names:  # an interrupt too must not leave requests behind
            engine.abort_request(names, internal=True)


def _take(outputs: Sequence[Any], running: dict[str, Sampled]) -> Iterator[Sampled]:
    """Adds a step's outputs to their requests; takes out those that ended."""
    for output in outputs:
        sampled = running.get(output.request_id)
        if sampled is None:  # of a request that was aborted while a step was in flight
            continue
        sampled.token_ids += output.new_token_ids
        if output.new_logprobs is not None:  # the first column is the sampled token's
            sampled.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
        if output.finish_reason is not None:
            sampled.finish_reason = str(output.finish_reason)
            yield running.pop(output.request_id)


def _watchdog(timeout_s: float | None) -> threading.Timer | None:
    """Says that a step does not return. More is not possible: a process that waits for a GPU can
    be ended, not interrupted."""
    if timeout_s is None:
        return None
    timer = threading.Timer(
        timeout_s + GRACE_S,
        log.error,
        (
            "generate: vLLM has not come back %g s after the time limit, so the GPU or its driver "
            "hangs; end this process and resume from the last checkpoint",
            GRACE_S,
        ),
    )
    timer.daemon = True
    timer.start()
    return timer


def _add(engine: Any, name: str, prompt: Any, params: Any, lora_request: Any) -> str:
    """vLLM's own name of the request."""
    try:
        return str(engine.add_request(name, prompt, params, lora_request=lora_request))
    except Exception as error:  # later versions' validation errors are no ValueError
        raise PromptError(f"vLLM refuses the request: {error}") from error


def step(engine: Any) -> Sequence[Any]:
    """One step of vLLM's ``LLMEngine``: an ``EngineCoreOutput`` of each request that drew."""
    try:
        outputs: Sequence[Any] = engine.engine_core.get_output().outputs
    except Exception as error:  # whatever it is, vLLM's scheduler is in the middle of a step
        raise EngineFailedError(
            f"vLLM failed while generating ({type(error).__name__}: {error}). The trainer's "
            "weights and optimizer are untouched; close this engine and build a new one, or go on "
            "from the last checkpoint"
        ) from error
    return outputs


class Gather(Groups):
    """``Groups`` of the requests that vLLM finishes; request ``i`` is for prompt ``i // n``."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        n: int,
        policy_version: int,
        on_finished: OnFinished | None,
    ) -> None:
        super().__init__(len(prompts), n, on_finished)
        self._prompts, self._version = prompts, policy_version
        self._drawing = Drawing(n * len(prompts))

    def __call__(self, sampled: Sampled) -> None:
        prompt, sample = divmod(sampled.number, self._n)
        made = completion(self._prompts[prompt], sampled, self._version)
        self._drawing.add(len(sampled.token_ids), 1)
        self.add(prompt, sample, made)


def completion(prompt: tuple[int, ...], sampled: Sampled, policy_version: int) -> Completion:
    """fxrl's completion from vLLM's."""
    reason = _FINISH.get(sampled.finish_reason)
    if reason is None:
        raise EngineError(
            f"vLLM ended a completion of {len(sampled.token_ids)} tokens with "
            f"{sampled.finish_reason!r} instead of a stop token or the length limit; see its log"
        )
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tuple(sampled.token_ids),
        logprobs=tuple(sampled.logprobs),
        finish_reason=reason,
        policy_version=policy_version,
    )
