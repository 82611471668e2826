"""Decode steps scheduled by fxrl beside those of vLLM's scheduler, on the same random requests."""

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest

from fxrl.engines import SamplingParams
from fxrl.engines.vllm import door
from fxrl.engines.vllm.decode_steps import DecodeSteps, serves
from fxrl.engines.vllm.options import VllmOptions

pytestmark = pytest.mark.vllm

STOP, BLOCK = 5, 8


class Lane:
    """A scheduler of vLLM's with a model that is made up: what it draws follows from the request's
    name and its length. Steps are ``ahead`` of what is drawn, as with asynchronous scheduling."""

    def __init__(self, core, kind, blocks, v2, ahead):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        config = core.scheduler.kv_cache_config
        (group,) = config.kv_cache_groups
        spec = dataclasses.replace(group.kv_cache_spec, block_size=BLOCK)
        group = dataclasses.replace(group, kv_cache_spec=spec)
        config = dataclasses.replace(config, num_blocks=blocks, kv_cache_groups=[group])
        self.scheduler = kind(core.vllm_config, config, core.structured_output_manager, BLOCK)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.use_v2_model_runner = v2
        self.ahead, self.flying = ahead, []
        self.tokens = 0

    def take_decode_steps(self):
        """fxrl's; ``left`` counts the steps and the tokens that it leaves to vLLM."""
        assert serves(self.scheduler)
        steps, self.left = door.decode_steps(self.scheduler), [0, 0]
        schedule, update = steps.plain_schedule, steps.plain_update

        def scheduled():
            self.left[0] += 1
            return schedule()

        def updated(made, drawn):
            self.left[1] += len(made.num_scheduled_tokens)
            return update(made, drawn)

        steps.plain_schedule, steps.plain_update = scheduled, updated
        steps.install()

    def add(self, name, prompt, most):
        from vllm import SamplingParams as Params
        from vllm.v1.request import Request

        params = Params(max_tokens=most, stop_token_ids=[STOP], ignore_eos=True, logprobs=0)
        self.scheduler.add_request(
            Request(
                request_id=name, prompt_token_ids=list(prompt), sampling_params=params,
                pooling_params=None, block_hasher=self.hasher,
            )
        )  # fmt: skip

    def abort(self, name):
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)

    def step(self):
        """What is scheduled, and what came of the step that ended."""
        made = self.scheduler.schedule() if self.scheduler.has_requests() else None
        if made is not None:
            self.flying.append((made, self._drawn(made)))
            self.tokens += len(made.num_scheduled_tokens)
        ended = []
        if self.flying and (made is None or len(self.flying) > self.ahead):
            for each in self.scheduler.update_from_output(*self.flying.pop(0)).values():
                ended += each.outputs
        return _said(made), {one.request_id: _came(one) for one in ended}

    def _drawn(self, made):
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        names, tokens = list(made.num_scheduled_tokens), []
        for name in names:
            request = self.scheduler.requests[name]
            token = random.Random(f"{name} {request.num_computed_tokens}").randrange(STOP, 40)
            tokens.append([] if request.is_prefill_chunk else [token])
        column = np.array([-float(sum(drawn)) for drawn in tokens], np.float32).reshape(-1, 1)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(column.astype(np.int32), column, column[:, 0]),
        )

    def state(self):
        """Of the cache and of the requests."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return (
            pool.get_num_free_blocks(),
            len(pool.cached_block_hash_to_block),
            [(one.request_id, one.num_computed_tokens) for one in self.scheduler.running],
            self.scheduler.get_request_counts(),
        )


def _said(made):
    """All of a ``SchedulerOutput``; new requests by their names and blocks."""
    if made is None:
        return None
    fields = {one.name: getattr(made, one.name) for one in dataclasses.fields(made)}
    fields["scheduled_new_reqs"] = [(new.req_id, new.block_ids) for new in made.scheduled_new_reqs]
    return fields


def _came(output):
    logprobs = output.new_logprobs.logprobs.tolist()
    return output.new_token_ids, logprobs, output.finish_reason, output.stop_reason


def _step_both(ours, theirs):
    (made, ended), (wanted, ends) = ours.step(), theirs.step()
    for name in wanted or {}:
        assert made[name] == wanted[name], name
    assert ended == ends
    assert ours.state() == theirs.state()


def check_agreement(core, seed, asynchronous, v2):
    """The same requests to two schedulers; returns the shares of steps and of tokens that fxrl
    took."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    draw = random.Random(seed)
    kind, ahead = (AsyncScheduler, 1) if asynchronous else (Scheduler, 0)
    blocks = draw.choice([12, 40, 200])  # few: requests give way to each other
    ours, theirs = (Lane(core, kind, blocks, v2, ahead) for _ in range(2))
    ours.take_decode_steps()
    longest = min(core.vllm_config.model_config.max_model_len, (blocks - 2) * BLOCK)
    prefix, steps, alive = [draw.randrange(6, 40) for _ in range(2 * BLOCK)], 0, []
    for wave in range(4):
        for each in range(draw.randrange(1, 9)):
            length = draw.randrange(1, longest // 2)
            own = [draw.randrange(6, 40) for _ in range(length)]
            prompt = (prefix[: draw.randrange(len(prefix))] + own)[: longest - 8]
            most = draw.randrange(1, longest - len(prompt))
            alive.append(f"{wave}-{each}")
            for lane in (ours, theirs):
                lane.add(alive[-1], prompt, most)
        for _ in range(draw.randrange(5, 60)):
            steps += 1
            _step_both(ours, theirs)
            if alive and draw.random() < 0.03:
                name = alive.pop(draw.randrange(len(alive)))
                for lane in (ours, theirs):
                    lane.abort(name)
    while ours.scheduler.has_requests() or ours.flying:
        steps += 1
        assert ours.step() == theirs.step()
    assert ours.state() == theirs.state()
    return 1 - ours.left[0] / steps, 1 - ours.left[1] / ours.tokens


@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_steps_are_vllms_own(engine, asynchronous, v2):
    core = engine._handle.engine.engine_core.engine_core
    shares = [check_agreement(core, seed, asynchronous, v2) for seed in range(12)]
    assert max(steps for steps, _ in shares) > 0.6
    assert max(tokens for _, tokens in shares) > 0.5


def test_completions_are_those_of_vllms_own_scheduling(engine):
    scheduler = engine._handle.engine.engine_core.engine_core.scheduler
    steps = scheduler.schedule.__self__
    assert isinstance(steps, DecodeSteps)
    prompts = [[3 + at] * (1 + 5 * at) for at in range(6)]
    params = SamplingParams(n=4, max_tokens=40, seed=3)
    ours = engine.generate(prompts, params)
    scheduler.schedule, scheduler.update_from_output = steps.plain_schedule, steps.plain_update
    try:
        assert engine.generate(prompts, params) == ours
    finally:
        steps.install()


@pytest.mark.parametrize(
    ("version", "wanted", "inside", "taken"),
    [
        ("0.32.0+cpu", True, True, True),
        ("0.32.0", False, True, False),
        ("0.99.0", True, True, False),
        ("0.32.0", True, False, False),
    ],
    ids=["taken", "not wanted", "another version", "another process"],
)
def test_where_vllm_schedules_all_steps(engine, version, wanted, inside, taken):
    core = engine._handle.engine.engine_core.engine_core
    scheduler = Lane(core, type(core.scheduler), 40, v2=False, ahead=0).scheduler
    of_process = {"engine_core": SimpleNamespace(scheduler=scheduler)} if inside else {}
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=SimpleNamespace(**of_process)))
    symbols = SimpleNamespace(module=SimpleNamespace(__version__=version))
    door.use_decode_steps(symbols, VllmOptions(decode_steps=wanted), llm)
    assert isinstance(scheduler.schedule.__self__, DecodeSteps) is taken


@pytest.mark.parametrize(
    ("name", "value"),
    [("connector", object()), ("num_spec_tokens", 2), ("use_pp", True), ("log_stats", True)],
)
def test_other_schedulers_are_left_alone(name, value):
    kind = type("FullAttentionManager", (), {"block_size": 16})

    def scheduler(of="Scheduler", kinds=(kind,), module="vllm.v1", **changed):
        coordinator = SimpleNamespace(single_type_managers=tuple(kind() for kind in kinds))
        made = type(of, (SimpleNamespace,), {"__module__": module})
        manager = SimpleNamespace(coordinator=coordinator)
        return made(kv_cache_manager=manager, num_sampled_tokens_per_step=1, **changed)

    assert serves(scheduler(**{name: None}))
    assert serves(scheduler("AsyncScheduler"))
    assert not serves(scheduler(**{name: value}))
    assert not serves(scheduler(kinds=(kind, object)))
    assert not serves(scheduler("FairScheduler"))
    assert not serves(scheduler(module="mine"))
