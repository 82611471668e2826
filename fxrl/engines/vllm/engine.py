"""``VllmEngine``: a real vLLM inside the trainer's process; built, then generate, standby, update.

It imports no vLLM: ``door.py`` alone does.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fxrl.engines.engine import (
    Built,
    Completion,
    EngineError,
    EngineSpec,
    OnFinished,
    SamplingParams,
    SamplingParamsError,
    check_awake,
    check_prompts,
    check_state,
    eos_ids,
    newer,
)
from fxrl.engines.ledger import CpuProbe, CudaProbe, MemoryLedger
from fxrl.engines.vllm import door
from fxrl.engines.vllm.build import build_llm
from fxrl.engines.vllm.handle import VllmHandle
from fxrl.engines.vllm.options import MOST_SEQUENCES, VllmOptions
from fxrl.engines.vllm.requests import (
    EngineFailedError,
    Gather,
    run_requests,
    sample_seed,
    sampling_arguments,
)
from fxrl.engines.vllm.standby import Standby
from fxrl.engines.weights.share.binder import SharingReport, share
from fxrl.engines.weights.sync import Route, WeightSync
from fxrl.errors import ConfigError


class VllmEngine:
    """``Engine`` on vLLM.

    One engine per process: vLLM's tagged pools are the process's own. The trainer's model may be
    made of the engine's weights (``shared_model``) and is then usable as long as the engine lives.

    Args:
        model_path: the checkpoint's folder.
        options: see ``VllmOptions``.
        eos_token_ids: ids that end a completion; may be empty.
        seed: of the engine's own draws.

    Attributes:
        ledger: who holds the GPU's memory.
        timings: seconds of the last ``"generate"``, ``"fold"``, ``"restore"``, ``"release"``,
            ``"wake"`` and ``"sync"``, each once it has happened.
        weight_sync: how the trainer's weights get in, see ``attach``.

    Raises:
        EngineLoadError: vLLM is not installed, or cannot load this model with these options.
        VllmOptionError: an option that the installed vLLM does not know.
        KvBudgetError: the GPU has no room.
    """

    def __init__(
        self,
        model_path: str | Path,
        options: VllmOptions | None = None,
        *,
        eos_token_ids: int | Iterable[int],
        seed: int = 0,
    ) -> None:
        eos = (eos_token_ids,) if isinstance(eos_token_ids, int) else eos_token_ids
        self.options, self.model_path = options or VllmOptions(), Path(model_path)
        self.eos_token_ids = frozenset(eos)
        symbols, ranks = door.installed(self.options), self.options.tensor_parallel_size
        on_gpu = symbols.device == "cuda"
        built: list[VllmHandle] = []
        self.ledger = MemoryLedger(
            CudaProbe(symbols.tags)
            if on_gpu
            else CpuProbe(lambda: built[0].cpu_bytes() if built else {})
        )
        self.ledger.before_load()
        attention = door.attention(self.options, symbols.device)
        warm_up = door.warm_up(self.options, symbols)
        with attention, warm_up, door.layers(self.options, symbols) as settled:
            llm = build_llm(
                symbols, settled, self.model_path, seed, self.ledger,
                door.WORKER, door.newest_worker,
            )  # fmt: skip
        self._handle = VllmHandle(llm, symbols, ranks, self.options.max_lora_rank)
        built.append(self._handle)
        door.use_decode_steps(symbols, self.options, llm)
        self.ledger.loaded()
        self.timings: dict[str, float] = {}
        self.weight_sync = WeightSync(self._handle, self.timings)
        drain = functools.partial(self._handle.drain, all_the_way=True)
        way = door.standby_way(symbols, self.options)
        self._standby = Standby(llm, way, self.ledger, drain, self.timings)
        self._seed, self._calls, self.policy_version = seed, 0, 0
        self._state = "awake"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        only: Collection[int] | None = None,
        on_finished: OnFinished | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        """See ``Engine.generate``. After a ``GenerateTimeoutError`` (``generate_timeout_s``) the
        engine can be used again, after an ``EngineFailedError`` not; a ``RestoreError`` (folded
        weights did not come back) must end the run."""
        check_awake(self._state, "generate")
        given = [tuple(map(int, prompt)) for prompt in prompts]
        if not given:
            return []
        config = self._handle.config
        limit = config.max_model_len
        limits = check_prompts(
            given, params, vocab_size=config.get_vocab_size(), limit=limit,
            of=f"max_model_len={limit}, which can be raised", max_tokens=max_tokens,
        )  # fmt: skip
        chosen = frozenset(range(len(given)) if only is None else only)
        each = enumerate(self._requests(given, params, limits))
        requests = {at: request for at, request in each if at // params.n in chosen}
        gather = Gather(given, params.n, self.policy_version, on_finished)
        with self.weight_sync.rollout():
            start = time.perf_counter()
            self._run(requests, gather)
            self.timings["generate"] = time.perf_counter() - start
        self.ledger.record("generate")
        return gather.all()

    def _run(self, requests: Mapping[int, tuple[Any, Any]], gather: Gather) -> None:
        """Leaves nothing in flight, for folded weights are taken out again right afterwards."""
        by_slots = self.weight_sync.way == "slots"
        try:
            try:
                run_requests(
                    self._handle.engine,
                    requests,
                    finished=gather,
                    tag=f"{self._calls}-",
                    lora_request=self._handle.lora_request if by_slots else None,
                    timeout_s=self.options.generate_timeout_s,
                )
            except EngineFailedError:
                raise
            except BaseException:
                self._handle.drain()
                raise
            self._handle.drain()
        except EngineFailedError:
            self._state = "failed"
            raise

    def _requests(
        self, given: list[tuple[int, ...]], params: SamplingParams, limits: list[int]
    ) -> list[tuple[Any, Any]]:
        arguments = sampling_arguments(params, self._handle.sampling_fields, self.eos_token_ids)
        base, call = (self._seed, self._calls) if params.seed is None else (params.seed, 0)
        greedy = params.temperature == 0
        count = len(given) * params.n
        seeds = [None if greedy else sample_seed(base, call, index) for index in range(count)]
        try:
            requests = self._handle.requests(given, seeds, arguments, limits)
        except Exception as error:  # later versions' validation errors are no ValueError
            raise SamplingParamsError(f"vLLM refuses a sampling parameter: {error}") from error
        if params.seed is None:
            self._calls += 1
        return requests

    def shared_model(self, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, SharingReport]:
        """The trainer's model, made of this engine's weights, and a ``SharingReport`` of what is
        shared; see ``fxrl.engines.weights.share.share``.

        What cannot be shared has a storage of its own, filled from the checkpoint, and is copied to
        the engine at each update. With ``tensor_parallel_size`` above 1, or packed weights, that is
        everything.
        """
        check_awake(self._state, "shared_model")
        model, report = share(
            self._handle.model_to_share(),
            self.model_path,
            dtype=dtype,
            device=self._handle.symbols.device,
            building=self._handle.symbols.quiet_config(),
        )
        if report.shared_bytes or report.mirrors:
            self.weight_sync.share(model, copied=report.copied, mirrors=report.mirrors)
        return model, report

    def attach(self, model: nn.Module, *, route: Route | None = None) -> None:
        """Serve ``model``, the trainer's, from now on: its adapter, or its weights. It may be
        wrapped by PEFT, and shared with the engine or not.

        An adapter's ``route`` is ``"slots"`` (if the engine has ``max_lora_rank``), ``"fold"`` or
        ``"copy"``; ``None`` takes the first that is possible. ``weight_sync.way`` and ``.reason``
        say which it was. Raises ``RouteError`` if that route, or any, is impossible.
        """
        check_awake(self._state, "attach")
        self.weight_sync.attach(model, route=route)
        self._handle.reset_prefix_cache()

    def most_at_once(self, tokens: int) -> int:
        """See ``Engine.most_at_once``; the KV cache may have room for less."""
        return self.options.num_sequences

    @contextmanager
    def standby(self) -> Iterator[None]:
        """See ``Engine.standby``. Raises ``WakeError`` at the end if the memory is not free again:
        the engine then stays in standby. If the block itself raises, the ``WakeError`` becomes a
        note of that."""
        check_awake(self._state, "standby")
        try:
            self._standby.release()
        except BaseException:  # what is mapped and what not is vLLM's secret then
            self._state = "failed"
            raise
        self._state = "standby"
        try:
            yield
        except BaseException as error:
            try:
                self.wake()
            except EngineError as failure:  # what ran out of memory may still hold it
                error.add_note(str(failure))
            raise
        self.wake()

    def wake(self) -> None:
        """See ``Engine.wake``. After a ``WakeError`` (``standby``), free memory and call again."""
        if self._state == "standby":
            self._standby.wake()
            self._state = "awake"

    def update_weights(self, *, policy_version: int) -> None:
        self._update(policy_version, lora=False)

    def update_lora(self, *, policy_version: int) -> None:
        self._update(policy_version, lora=True)

    def _update(self, version: int, *, lora: bool) -> None:
        check_awake(self._state, "update_lora" if lora else "update_weights")
        newer(version, self.policy_version)
        try:
            self.weight_sync.update(lora=lora)
        finally:
            self._handle.reset_prefix_cache()  # whatever has got in, old entries are stale
        self.policy_version = version
        self.ledger.record("sync")

    def state_dict(self) -> dict[str, Any]:
        """The number of calls stands for the sampler's random state."""
        return {"calls": self._calls, "policy_version": self.policy_version, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, {"calls", "policy_version", "seed"})
        self._calls, self._seed = int(state["calls"]), int(state["seed"])
        self.policy_version = int(state["policy_version"])

    def close(self) -> None:
        """See ``Engine.close``. A model made of the engine's weights keeps them alive, and vLLM
        cannot be built again in this process before that model is gone too."""
        if self._state != "closed":
            self._state = "closed"
            self._standby.llm = None
            self._handle.shutdown()


def build(spec: EngineSpec) -> Built:
    """The engine first: the trainer's model is made of its weights."""
    folder, tokenizer = spec.folder()
    options = _options_of(spec, folder)
    sizes = f"max_model_len={options.max_model_len}, max_num_seqs={options.max_num_seqs}"
    generation = None
    if (folder / "generation_config.json").is_file():
        from transformers import GenerationConfig

        generation = GenerationConfig.from_pretrained(str(folder))
    eos = sorted(eos_ids(tokenizer, generation))
    with spec.stage(f"starting vLLM: {sizes}, {options.dtype}"):
        engine = VllmEngine(folder, options, eos_token_ids=eos, seed=spec.seed)
    try:
        with spec.stage("making the trainer's model of vLLM's weights"):
            model, report = engine.shared_model(dtype=spec.dtype)
        spec.tell(str(report))
        if (place := next(model.parameters()).device).type != spec.device.type:
            raise ConfigError(
                f"model.device is {spec.device.type}, but vLLM and the model made of its weights "
                f"are on {place.type}; use auto"
            )
        model = spec.trainable(model)
        engine.attach(model)
        sync = engine.weight_sync
        spec.tell(f"rollouts take the trained weights by {sync.way!r}: {sync.reason}")
    except BaseException:
        engine.close()
        raise
    return Built(model, tokenizer, engine)


def _longest(spec: EngineSpec, folder: Path) -> int:
    """Most tokens of a prompt and its completion; vLLM refuses more than the model's positions,
    which a mere bound of what prompts may grow to does not ask for."""
    from transformers import AutoConfig

    longest = spec.longest_prompt + spec.max_tokens
    if not spec.prompts_grow:
        return longest
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config()
    return min(longest, getattr(config, "max_position_embeddings", None) or longest)


def _options_of(spec: EngineSpec, folder: Path) -> VllmOptions:
    """The user's, with what they leave open taken from the run."""
    options: VllmOptions = spec.options or VllmOptions()
    if options.max_model_len is None:
        options = dataclasses.replace(options, max_model_len=_longest(spec, folder))
    if options.max_num_seqs is None:
        options = dataclasses.replace(options, max_num_seqs=min(spec.num_sequences, MOST_SEQUENCES))
    if options.dtype == "auto":
        dtype = str(spec.autocast or spec.dtype).removeprefix("torch.")
        options = dataclasses.replace(options, dtype=dtype)
    if options.quantization is not None and options.max_lora_rank is None and spec.lora_rank:
        # Rounding to so few bits takes most of a small change off a weight: it cannot be folded.
        rank = 1 << max(3, (spec.lora_rank - 1).bit_length())  # as vLLM sizes its slots
        options = dataclasses.replace(options, max_lora_rank=rank)
        spec.tell(f"quantized weights take no folded adapter: LoRA slots of rank {rank}")
    return options
