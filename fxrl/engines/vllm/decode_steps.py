"""Scheduling steps in which every running sequence takes one token; wraps vLLM's scheduler.

Works on vLLM's objects as they are handed in; imports no vLLM.

NOTE [Why decode steps are scheduled here]
vLLM's scheduler asks anew for every sequence and step what may have happened to it, which takes 20
us of Python each. With 256 sequences of a model of 2B that is longer than the GPU's step, so the
GPU waits. In an RL run nearly all steps are alike: nothing waits for a place, nobody prefills, each
sequence takes one token, and most tokens neither end it nor fill a block of the cache. Such a
step's ``SchedulerOutput`` is the one before it with other numbers, and such a token is appended to
its request. ``DecodeSteps`` does that, and leaves to vLLM all else: steps with requests that wait
or prefill, images, grammars, a pause, a cache without room; tokens that end a request or let a
block be shared; the giving of blocks; what follows a step (``_update_after_schedule``). What is
scheduled, what comes of it and what the cache holds are equal to vLLM's, field by field (a test
compares them on random requests).

It takes private names of vLLM, so it serves the versions that it was tested with; with another one
vLLM schedules all steps itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

_SET = frozenset(
    {
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "finished_req_ids",
        "num_common_prefix_blocks",
    }
)
"""The fields of a decode step's ``SchedulerOutput`` that say something; all others are empty."""

_ABSENT = (
    "connector",
    "ec_connector",
    "aux_output_connector",
    "use_pp",
    "num_lookahead_tokens",
    "num_spec_tokens",
    "is_encoder_decoder",
    "need_mamba_block_aligned_split",
    "needs_kv_cache_zeroing",
    "enable_return_routed_experts",
    "return_sampling_mask",
    "log_stats",
)
"""What a scheduler must be without, under its attributes' names in vLLM."""

_DRAWN = frozenset({"req_ids", "req_id_to_index", "sampled_token_ids", "logprobs"})
"""The fields of a decode step's ``ModelRunnerOutput`` that say something."""


def serves(scheduler: Any) -> bool:
    """Whether the steps of this scheduler can be alike: a class of vLLM's, nothing but attention
    over all keys in one pool of blocks, and one sampled token a step."""
    kind = type(scheduler)
    if kind.__name__ not in ("Scheduler", "AsyncScheduler") or kind.__module__[:5] != "vllm.":
        return False  # ``scheduler_cls`` may be somebody's own, with other rules
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return (
        [type(one).__name__ for one in managers] == ["FullAttentionManager"]
        and scheduler.num_sampled_tokens_per_step == 1
        and not any(getattr(scheduler, name, None) for name in _ABSENT)
    )


class DecodeSteps:
    """Takes the place of ``schedule`` and ``update_from_output`` of vLLM's ``scheduler``, see NOTE
    [Why decode steps are scheduled here]. ``output`` and ``outputs`` are the classes
    ``EngineCoreOutput`` and ``EngineCoreOutputs``, ``running`` is ``RequestStatus.RUNNING``."""

    def __init__(self, scheduler: Any, output: Any, outputs: Any, running: Any) -> None:
        self._scheduler = scheduler
        self._output, self._outputs, self._running = output, outputs, running
        self.plain_schedule, self.plain_update = scheduler.schedule, scheduler.update_from_output
        self._manager = scheduler.kv_cache_manager
        (blocks,) = self._manager.coordinator.single_type_managers
        self._block_size: int = blocks.block_size
        self._before: Any = None  # the step before, if it was one of these or could have been
        self._flying: list[Any] = []  # steps made here of which nothing has come yet

    def install(self) -> None:
        self._scheduler.schedule = self.schedule
        self._scheduler.update_from_output = self.update_from_output

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's ``Scheduler.schedule``."""
        made = None if self._before is None else self._next()
        if made is None:
            made = self.plain_schedule(*args, **kwargs)
            self._before = made if self._is_decoding(made) else None
        else:
            self._before = made
            self._flying.append(made)
        return made

    def _is_decoding(self, made: Any) -> bool:
        """Whether the step after ``made``, which vLLM has made, will be like it."""
        cached = made.scheduled_cached_reqs
        return (
            len(cached.req_ids) == made.total_num_scheduled_tokens > 0
            and not (cached.resumed_req_ids or cached.new_token_ids or cached.all_token_ids)
            and _says_only(made, _SET)
            and all(_decodes(request) for request in self._scheduler.running)
        )

    def _next(self) -> Any:
        """The next step, or ``None`` where it is vLLM's to make."""
        scheduler = self._scheduler
        if _waits(scheduler):
            return None
        requests = self._requests()
        if not requests:
            return None
        size = self._block_size
        # A token that opens a block needs one; one that fills it lets others share it.
        edges = [
            at
            for at, request in enumerate(requests)
            if request.num_computed_tokens % size in (0, size - 1)
        ]
        if len(edges) > self._manager.block_pool.get_num_free_blocks():
            return None  # somebody may have to give way
        scheduler.current_step += 1
        self._manager.new_step_starts()
        blocks: list[Any] = [None] * len(requests)
        for at in edges:
            given = self._manager.allocate_slots(requests[at], 1)
            blocks[at] = given.get_block_ids(allow_none=True)
        made = self._made(requests, blocks)
        scheduler._update_after_schedule(made)
        return made

    def _requests(self) -> list[Any] | None:
        """Those that take a token now; ``None`` if one of them is not at its last token."""
        requests, most = [], self._scheduler.max_model_len - 1
        for request in self._scheduler.running:
            done, pending = request.num_computed_tokens, request.num_output_placeholders
            # A step in flight draws its last token.
            if pending and done + 2 - pending >= request.num_prompt_tokens + request.max_tokens:
                continue
            if request.num_tokens + pending - done != 1 or done >= most:
                return None
            requests.append(request)
        return requests

    def _made(self, requests: Sequence[Any], blocks: list[Any]) -> Any:
        before, scheduler = self._before, self._scheduler
        names = [request.request_id for request in requests]
        cached = dataclasses.replace(
            before.scheduled_cached_reqs,
            req_ids=names,
            new_block_ids=blocks,
            num_computed_tokens=[request.num_computed_tokens for request in requests],
            num_output_tokens=[
                request.num_output_tokens + request.num_output_placeholders for request in requests
            ],
        )
        changes: dict[str, Any] = {}
        if getattr(before, "num_common_prefix_blocks", None):  # a number for the pool, until 0.31
            first = scheduler.running[0].request_id
            changes["num_common_prefix_blocks"] = self._manager.get_num_common_prefix_blocks(first)
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids.clear()
            scheduler.prev_step_scheduled_req_ids.update(names)
        return dataclasses.replace(
            before,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=dict.fromkeys(names, 1),
            total_num_scheduled_tokens=len(names),
            finished_req_ids=scheduler.finished_req_ids,
            **changes,
        )

    def update_from_output(self, made: Any, drawn: Any) -> Any:
        """vLLM's ``Scheduler.update_from_output``: from what was scheduled and what the model drew
        to ``EngineCoreOutputs`` by client."""
        ours = any(one is made for one in self._flying)
        self._flying = [one for one in self._flying if one is not made]
        if not (ours and drawn.sampled_token_ids and _says_only(drawn, _DRAWN)):
            return self.plain_update(made, drawn)
        outputs, rest = [], {}
        for name in made.num_scheduled_tokens:
            request, at = self._scheduler.requests.get(name), drawn.req_id_to_index[name]
            tokens = drawn.sampled_token_ids[at]
            if request is not None and self._append(request, tokens):
                logprobs = drawn.logprobs and drawn.logprobs.slice_request(at, 1)
                outputs.append(self._output(name, tokens, new_logprobs=logprobs))
            else:
                rest[name] = 1
        left = dataclasses.replace(
            made, num_scheduled_tokens=rest, total_num_scheduled_tokens=len(rest)
        )
        by_client: dict[int, Any] = self.plain_update(left, drawn)
        mine = by_client.setdefault(0, self._outputs())
        mine.outputs = outputs + mine.outputs
        return by_client

    def _append(self, request: Any, tokens: Sequence[int]) -> bool:
        """Appends what was drawn, if nothing else comes of it."""
        params, length = request.sampling_params, request.num_tokens + 1
        if (
            len(tokens) != 1
            or request.status != self._running
            or getattr(request, "async_tokens_to_discard", 0)  # until 0.25
            or getattr(request, "num_stale_output_tokens", 0)  # its successor
            or tokens[0] == params.eos_token_id
            or tokens[0] in (params.stop_token_ids or ())
            or params.repetition_detection is not None
            or request.num_output_tokens + 1 >= request.max_tokens
            or length >= self._scheduler.max_model_len
            or length % self._block_size <= 1  # a block is full, or its last entry is computed
        ):
            return False
        request._output_token_ids.append(tokens[0])
        request._all_token_ids.append(tokens[0])
        if request.num_output_placeholders:
            request.num_output_placeholders -= 1
        if hasattr(request, "num_in_flight_tokens"):  # after 0.25
            request.num_in_flight_tokens -= 1
        return True


def _says_only(what: Any, names: frozenset[str]) -> bool:
    """Whether the dataclass ``what`` is empty outside of these fields."""
    return not any(
        getattr(what, one.name) for one in dataclasses.fields(what) if one.name not in names
    )


def _waits(scheduler: Any) -> bool:
    """Whether a request may take a place that is free, or everybody waits for a pause's end."""
    places = getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)
    if scheduler.pause_state or len(scheduler.running) >= places:
        return bool(scheduler.pause_state)
    queues = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return any(getattr(scheduler, name, None) for name in queues)


def _decodes(request: Any) -> bool:
    """Whether all that a request has ahead of it is one sampled token a step."""
    return not (
        request.is_prefill_chunk
        or request.use_structured_output
        or request.has_encoder_inputs
        or request.pooling_params
        or request.resumable
    )
