"""What an engine on vLLM does once it is built: generate, standby, update. Imports no vLLM."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxrl.runtime.engine import (
    Completion,
    EngineError,
    OnFinished,
    SamplingParams,
    SamplingParamsError,
)
from fxrl.runtime.ledger import MemoryLedger
from fxrl.runtime.lora_route import Kind
from fxrl.runtime.policy import Policy
from fxrl.runtime.shared_weights import SharingReport, share
from fxrl.runtime.standby import Standby, Way
from fxrl.runtime.vllm_inside import Inside
from fxrl.runtime.vllm_options import VllmOptions
from fxrl.runtime.vllm_params import check_prompts, sample_seed, sampling_arguments
from fxrl.runtime.vllm_requests import EngineFailedError, Gather, run_requests


class Serving:
    """Base of ``VllmEngine``.

    Args:
        inside: the built engine.
        way: how the KV cache is released.
        ledger: has an entry of the load already.
        options, model_path, eos_token_ids, seed: see ``VllmEngine``.
    """

    def __init__(
        self,
        inside: Inside,
        way: Way,
        ledger: MemoryLedger,
        *,
        options: VllmOptions,
        model_path: Path,
        eos_token_ids: frozenset[int],
        seed: int,
    ) -> None:
        self._inside, self.ledger = inside, ledger
        self.options, self.model_path, self.eos_token_ids = options, model_path, eos_token_ids
        self.timings: dict[str, float] = {}
        self.policy = Policy(inside, self.timings)
        drain = functools.partial(inside.drain, all_the_way=True)
        self._standby = Standby(inside.llm, way, ledger, drain, self.timings)
        self._seed, self._calls, self._policy_version = seed, 0, 0
        self._state = "awake"

    @property
    def policy_version(self) -> int:
        """See ``Engine.policy_version``."""
        return self._policy_version

    @property
    def vllm_model(self) -> nn.Module:
        """The model inside vLLM.

        Raises:
            EngineError: it is in other processes (``tensor_parallel_size`` above 1).
        """
        return self._inside.model()

    @property
    def standby_way(self) -> Way:
        """How the KV cache is released, see ``fxrl/runtime/standby.py``."""
        return self._standby.way

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        on_finished: OnFinished | None = None,
    ) -> list[list[Completion]]:
        """See ``Engine.generate``; also

        Raises:
            GenerateTimeoutError: ``generate_timeout_s`` is over; the engine can be used again.
            EngineFailedError: vLLM failed; the engine cannot be used any more.
            RestoreError: folded weights did not come back; the run must end.
        """
        self._must_be_awake("generate")
        given = [tuple(map(int, prompt)) for prompt in prompts]
        if not given:
            return []
        config = self._inside.config
        check_prompts(
            given, params, vocab_size=config.get_vocab_size(), max_model_len=config.max_model_len
        )
        requests = self._requests(given, params)
        gather = Gather(given, params.n, self._policy_version, on_finished)
        with self.policy.rollout():
            start = time.perf_counter()
            self._run(requests, gather)
            self.timings["generate"] = time.perf_counter() - start
        self.ledger.record("generate")
        return gather.groups()

    def _run(self, requests: list[tuple[Any, Any]], gather: Gather) -> None:
        """Leaves nothing in flight, for folded weights are taken out again right afterwards."""
        try:
            try:
                run_requests(
                    self._inside.engine,
                    requests,
                    finished=gather,
                    tag=f"{self._calls}-",
                    lora_request=self._inside.lora_request if self.policy.uses_slots else None,
                    timeout_s=self.options.generate_timeout_s,
                )
            except EngineFailedError:
                raise
            except BaseException:
                self._inside.drain()
                raise
            self._inside.drain()
        except EngineFailedError:
            self._state = "failed"
            raise

    def _requests(
        self, given: list[tuple[int, ...]], params: SamplingParams
    ) -> list[tuple[Any, Any]]:
        arguments = sampling_arguments(params, self._inside.sampling_fields, self.eos_token_ids)
        base, call = (self._seed, self._calls) if params.seed is None else (params.seed, 0)
        greedy = params.temperature == 0
        count = len(given) * params.n
        seeds = [None if greedy else sample_seed(base, call, index) for index in range(count)]
        try:
            requests = self._inside.requests(given, seeds, arguments)
        except Exception as error:  # later versions' validation errors are no ValueError
            raise SamplingParamsError(f"vLLM refuses a sampling parameter: {error}") from error
        if params.seed is None:
            self._calls += 1
        return requests

    def _must_be_awake(self, what: str) -> None:
        cures = {
            "standby": "leave its block or call wake()",
            "closed": "make a new one",
            "failed": "vLLM failed earlier; close() it and make a new one",
        }
        if self._state != "awake":
            raise EngineError(f"{what}: the engine is {self._state}; {cures[self._state]}")

    def shared_model(
        self,
        dtype: torch.dtype = torch.bfloat16,
        *,
        config: Any = None,
        attn_implementation: str | None = None,
    ) -> tuple[nn.Module, SharingReport]:
        """The trainer's model, made of this engine's weights, and what is shared and what not.

        What cannot be shared has a storage of its own, filled from the checkpoint, and is copied to
        the engine at each update: with ``tensor_parallel_size`` above 1 or packed weights all of
        it. The report says so.

        Returns:
            (model, ``SharingReport``); see ``fxrl.runtime.shared_weights.share``.

        Raises:
            SharingError, EngineError: see there.
        """
        self._must_be_awake("shared_model")
        model, report = share(
            self._inside.model_to_share(),
            config,
            self.model_path,
            dtype=dtype,
            device=self._inside.names.device,
            attn_implementation=attn_implementation,
            building=self._inside.names.quiet_config(),
        )
        if report.shared_bytes or report.mirrors:
            self.policy.share(model, copied=report.copied, mirrors=report.mirrors)
        return model, report

    def attach(
        self,
        model: nn.Module,
        *,
        route: Kind | None = None,
        decode_steps: float = 1024.0,
        num_sequences: int | None = None,
    ) -> None:
        """Serves ``model`` from now on: its adapter, or its weights.

        Args:
            model: the trainer's, bare or wrapped by PEFT; shared with the engine or not.
            route: ``"fold"``, ``"slots"`` or ``"copy"`` for an adapter; ``None`` takes the cheapest
                possible one. ``policy.way`` and ``policy.reason`` say which it was.
            decode_steps: expected of a rollout, about the longest completion.
            num_sequences: decoded at once; ``None`` is ``max_num_seqs``.

        Raises:
            RouteError: the route is not possible, or none is.
        """
        self._must_be_awake("attach")
        self.policy.attach(
            model,
            force=route,
            decode_steps=decode_steps,
            num_sequences=num_sequences or self.options.max_num_seqs,
        )
        self._inside.reset_prefix_cache()

    @contextmanager
    def standby(self) -> Iterator[None]:
        """See ``Engine.standby``; the KV cache's memory is free inside.

        Raises:
            WakeError: at the end, if the memory is not free again; the engine stays in standby.
        """
        self._must_be_awake("standby")
        try:
            self._standby.release()
        except BaseException:  # what is mapped and what not is vLLM's secret then
            self._state = "failed"
            raise
        self._state = "standby"
        try:
            yield
        finally:
            self.wake()

    def wake(self) -> None:
        """See ``Engine.wake``.

        Raises:
            WakeError: see ``standby``; free memory and call again.
        """
        if self._state == "standby":
            self._standby.wake()
            self._state = "awake"

    def update_weights(
        self, weights: Mapping[str, Tensor] | None = None, *, policy_version: int
    ) -> None:
        """See ``Engine.update_weights``; ``None`` reads the attached (or shared) model."""
        self._update(weights, policy_version, lora=False)

    def update_lora(
        self, adapter: Mapping[str, Tensor] | None = None, *, policy_version: int
    ) -> None:
        """See ``Engine.update_lora``; ``None`` reads the attached model."""
        self._update(adapter, policy_version, lora=True)

    def _update(self, given: Mapping[str, Tensor] | None, version: int, *, lora: bool) -> None:
        self._must_be_awake("update_lora" if lora else "update_weights")
        if version < self._policy_version:
            raise EngineError(
                f"policy_version={version} is older than the engine's {self._policy_version}; "
                "versions only grow (load_state_dict goes back)"
            )
        try:
            self.policy.update(given, lora=lora)
        finally:
            self._inside.reset_prefix_cache()  # whatever has got in, old entries are stale
        self._policy_version = version
        self.ledger.record("sync")

    def state_dict(self) -> dict[str, Any]:
        """See ``Engine.state_dict``; the number of calls stands for the sampler's random state."""
        return {"calls": self._calls, "policy_version": self._policy_version, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See ``Engine.load_state_dict``."""
        if missing := {"calls", "policy_version", "seed"} - state.keys():
            raise EngineError(
                f"engine state lacks {', '.join(sorted(missing))}; pass what state_dict() returned"
            )
        self._calls, self._seed = int(state["calls"]), int(state["seed"])
        self._policy_version = int(state["policy_version"])

    def close(self) -> None:
        """See ``Engine.close``. A model made of the engine's weights keeps them alive, and vLLM
        cannot be built again in this process before that model is gone too."""
        if self._state != "closed":
            self._state = "closed"
            self._standby.llm = None
            self._inside.shutdown()
