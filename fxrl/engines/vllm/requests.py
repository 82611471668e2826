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
stepped by hand, so a call can be aborted between two steps. It is also no slower: the steps
are the same ones, without a progress bar, and each sample is a request of its own with a seed of
its own, so no parent request has to gather samples.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
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
        "flat_logprobs": "it is a matter of speed, and on",
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
        "flat_logprobs": True,  # a list of floats instead of a dict of objects per token
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


def run_requests(
    engine: Any,
    requests: Sequence[tuple[Any, Any]],
    *,
    finished: Callable[[int, Any], None],
    tag: str = "",
    lora_request: Any = None,
    timeout_s: float | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Runs requests to their end.

    Args:
        engine: vLLM's ``LLMEngine``.
        requests: (vLLM prompt, vLLM sampling parameters), each for one completion.
        finished: called with each request's number and vLLM's ``CompletionOutput`` when it is
            done, in any order; what it raises ends the call.
        tag: starts the requests' names, to tell this call's from another's.
        lora_request: vLLM's, for all of them.
        timeout_s: after that many seconds they are aborted.
        clock: seconds.

    Raises:
        GenerateTimeoutError: the engine is as before.
        EngineFailedError: vLLM raised; whatever it was in the middle of is lost.
        PromptError: vLLM refuses a request; the engine is as before.
    """
    running = {f"{tag}{index}": index for index in range(len(requests))}
    deadline = None if timeout_s is None else clock() + timeout_s
    watchdog = _watchdog(timeout_s)
    try:
        for name, (prompt, params) in zip(list(running), requests, strict=True):
            _add(engine, name, prompt, params, lora_request)
        while running:
            for output in step(engine):
                if output.finished:
                    finished(running.pop(output.request_id), output.outputs[0])
            if running and deadline is not None and clock() > deadline:
                raise GenerateTimeoutError(
                    f"generate: {len(running)} of {len(requests)} completions were not done after "
                    f"{timeout_s:g} s and were aborted; weights and trainer are as before. Raise "
                    "vllm.generate_timeout_s or lower max_tokens"
                )
    except EngineFailedError:
        raise
    except BaseException:  # an interrupt too must not leave requests behind
        engine.abort_request(list(running))
        raise
    finally:
        if watchdog is not None:
            watchdog.cancel()


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


def _add(engine: Any, name: str, prompt: Any, params: Any, lora_request: Any) -> None:
    try:
        engine.add_request(name, prompt, params, lora_request=lora_request)
    except Exception as error:  # later versions' validation errors are no ValueError
        raise PromptError(f"vLLM refuses the request: {error}") from error


def step(engine: Any) -> list[Any]:
    """One step of vLLM's ``LLMEngine``: the outputs that it ended."""
    try:
        outputs: list[Any] = engine.step()
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

    def __call__(self, index: int, output: Any) -> None:
        """Takes request ``index``'s output."""
        prompt, sample = divmod(index, self._n)
        made = completion(self._prompts[prompt], output, self._version)
        self._drawing.add(len(output.token_ids), 1)
        self.add(prompt, sample, made)


def completion(prompt: tuple[int, ...], output: Any, policy_version: int) -> Completion:
    """fxrl's completion from vLLM's."""
    reason = _FINISH.get(str(output.finish_reason))
    if reason is None:
        raise EngineError(
            f"vLLM ended a completion of {len(output.token_ids)} tokens with "
            f"{output.finish_reason!r} instead of a stop token or the length limit; see its log"
        )
    flat = output.logprobs
    return Completion(
        prompt_token_ids=prompt,
        token_ids=tuple(output.token_ids),
        logprobs=tuple(flat.logprobs[at] for at in flat.start_indices),  # the sampled token's
        finish_reason=reason,
        policy_version=policy_version,
    )
