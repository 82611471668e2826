"""``TorchEngine``: sampling with the very model that is being trained, in this process.

No second copy of the weights, no server, no kernels of its own: any Hugging Face causal LM, bare or
with LoRA, on a CPU or a GPU. It is the reference for the faster engines and what small models use.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fxrl.engines.engine import (
    Built,
    Completion,
    Drawing,
    EngineError,
    EngineSpec,
    Groups,
    OnFinished,
    PromptError,
    SamplingParams,
    check_awake,
    check_prompts,
    check_state,
    eos_ids,
    newer,
)
from fxrl.engines.torch.decoding import CausalLM, Decoded, decode
from fxrl.engines.torch.sampling import log_probs
from fxrl.models.hf import eval_mode

log = logging.getLogger(__name__)


CHECKED_TOKENS = 64
"""Of how many tokens of a padded row the log-probs are held against the row alone."""


class TorchEngine:
    """Embedded ``Engine`` with a batched KV cache.

    Prompts are padded on the left, unless the model's numbers show that it counts padding, and run
    through the model once each; their ``n`` completions share that prefill. All random numbers of a
    request are drawn before it starts, one per token, on the CPU: what a completion is does not
    depend on how the request is cut into batches, nor on which rows have already ended, beyond the
    rounding of the model itself (in bf16, a matrix product's rounding depends on the batch size).

    The model is put into eval mode without gradient while it generates, and every module's own
    train mode is restored.

    Args:
        model: shared with the trainer; its device is looked up at each call.
        eos_token_ids: ids that end a completion; may be empty.
        pad_token_id: fills short prompts; any valid id.
        seed: of the engine's own generator.
        max_batch_tokens: KV cache of one batch, in tokens: rows * (longest prompt + max_tokens).
            A larger request is cut into several batches.
        autocast: dtype of ``torch.autocast`` while generating, e.g. bf16 over fp32 weights;
            ``None`` leaves whatever the caller has switched on.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        eos_token_ids: int | Iterable[int],
        pad_token_id: int,
        seed: int = 0,
        max_batch_tokens: int = 65536,
        autocast: torch.dtype | None = None,
    ) -> None:
        eos = (eos_token_ids,) if isinstance(eos_token_ids, int) else tuple(eos_token_ids)
        if max_batch_tokens < 2:
            raise EngineError(f"max_batch_tokens={max_batch_tokens} is below 2; 65536 is usual")
        self.model = model
        self.eos_token_ids = frozenset(eos)
        self.pad_token_id = pad_token_id
        self.max_batch_tokens = max_batch_tokens
        self.autocast = autocast
        self._lm = CausalLM(model)
        self._generator = torch.Generator().manual_seed(seed)
        self.policy_version = 0
        self.timings: Mapping[str, float] = {}  # nothing here is worth telling apart
        self._state = "awake"
        self._tried = {True: 0, False: 0}  # padded -> tokens of the longest row that was tried

    @classmethod
    def from_tokenizer(cls, model: nn.Module, tokenizer: Any, **options: Any) -> Self:
        """An engine with the tokenizer's padding id and EOS (and the generation config's). Raises
        ``EngineError`` if the tokenizer has neither a padding nor an EOS token."""
        eos = eos_ids(tokenizer, getattr(model, "generation_config", None))
        if (pad := tokenizer.pad_token_id) is None and (pad := min(eos, default=None)) is None:
            raise EngineError(
                "the tokenizer has neither pad_token nor eos_token; set one, or give "
                "eos_token_ids and pad_token_id to TorchEngine"
            )
        return cls(model, eos_token_ids=eos, pad_token_id=pad, **options)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        only: Collection[int] | None = None,
        on_finished: OnFinished | None = None,
        max_tokens: Sequence[int] | None = None,
    ) -> list[list[Completion]]:
        check_awake(self._state, "generate")
        if params.extra:
            raise EngineError(
                f"generate: extra sampling parameters {', '.join(params.extra)} are vLLM's, and "
                "this is the embedded engine; leave them out or use the vLLM engine"
            )
        given = [tuple(map(int, prompt)) for prompt in prompts]
        limit = self._lm.max_positions
        limits = check_prompts(
            given,
            params,
            vocab_size=self._lm.num_embeddings,
            limit=sys.maxsize if limit is None else limit,
            of=f"the model's {limit} positions",
            max_tokens=max_tokens,
        )
        numbers = range(len(given)) if only is None else sorted(only)
        batches = plan_microbatches(
            [len(prompt) for prompt in given],
            params.n,
            limits,
            self.max_batch_tokens,
            only=numbers,
            pad=self._lm.takes_padding,
        )
        uniforms = self._uniforms(len(given) * params.n, params)
        found = Groups(len(given), params.n, on_finished)
        drawing = Drawing(len(numbers) * params.n)
        with eval_mode(self.model), torch.no_grad(), self._autocast():
            for groups in batches:
                for key, made in self._run(groups, given, params, uniforms, drawing, limits):
                    found.add(*key, made)
        return found.all()

    def _run(
        self,
        groups: Sequence[Group],
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        uniforms: Tensor | None,
        drawing: Drawing,
        limits: Sequence[int],
    ) -> Iterator[tuple[tuple[int, int], Completion]]:
        lengths = {len(prompts[g.prompt]) for g in groups}
        if len(lengths) > 1 and not self._lm.takes_padding:  # found out since the batch was planned
            for length in lengths:
                equal = [g for g in groups if len(prompts[g.prompt]) == length]
                yield from self._run(equal, prompts, params, uniforms, drawing, limits)
            return
        keys = [(g.prompt, g.first + i) for g in groups for i in range(g.count)]
        flat = [prompt * params.n + sample for prompt, sample in keys]
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        done = decode(
            self._lm,
            [prompts[g.prompt] for g in groups],
            [g.count for g in groups],
            params,
            uniforms=None if uniforms is None else uniforms[flat],
            stop_ids=sorted(stop_ids),
            pad_id=self.pad_token_id,
            device=next(self.model.parameters()).device,
            drawing=drawing,
            limits=[limits[g.prompt] for g in groups],
        )
        if self._differs_from_scoring(keys, prompts, params, done) and len(lengths) > 1:
            self._lm.padding_differs = True
            drawing.add(0, -len(keys))
            yield from self._run(groups, prompts, params, uniforms, drawing, limits)
            return
        drawn = (part.tolist() for part in (done.tokens, done.logprobs, done.lengths))
        for key, tokens, logprobs, length in zip(keys, *drawn, strict=True):
            yield (
                key,
                Completion(
                    prompt_token_ids=prompts[key[0]],
                    token_ids=tuple(tokens[:length]),
                    logprobs=tuple(logprobs[:length]),
                    finish_reason="stop" if tokens[length - 1] in stop_ids else "length",
                    policy_version=self.policy_version,
                ),
            )

    def _differs_from_scoring(
        self,
        keys: Sequence[tuple[int, int]],
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        done: Decoded,
    ) -> bool:
        """Whether a row, a padded one if there is any, was drawn with other log-probs than one
        forward over the row alone gives, which is how the trainer scores it; that is told.

        NOTE [Why this is tried]
        That a model takes ``position_ids``, a mask and a cache does not say what they reach: one
        that sums up windows of its tokens cuts them from the left, padding included; one has a
        window in its cache and none in its forward. It costs a forward of one row, for the first
        batch and for each that is twice as long as any tried, since a window may be longer.
        """
        ends = [len(prompts[prompt]) for prompt, _ in keys]
        widest, lengths = max(ends), done.lengths.tolist()
        padded = [row for row, end in enumerate(ends) if end < widest]
        row = max(padded or range(len(keys)), key=lambda row: ends[row] + lengths[row])
        drawn = slice(max(lengths[row] - CHECKED_TOKENS, 0), lengths[row])
        ids = done.tokens.new_tensor(prompts[keys[row][0]])
        ids = torch.cat([ids, done.tokens[row, : drawn.stop]])
        if len(ids) < 2 * self._tried[bool(padded)]:
            return False
        self._tried[bool(padded)] = len(ids)
        logits = self._lm.score(ids, drawn.stop - drawn.start)
        alone = log_probs(logits, params.temperature).gather(1, done.tokens[row, drawn, None])
        off = float((done.logprobs[row, drawn] - alone[:, 0]).abs().mean())
        if off <= self._lm.rounding(logits):
            return False
        log.warning(
            "%s: log-probs drawn with its cache%s are %.2g off (mean of %d tokens) those of one "
            "forward; %s",
            type(self.model).__name__,
            " and padding" if padded else "",
            off,
            len(alone),
            "no batch is padded from now on"
            if padded
            else "its rollouts are of another policy than the one that is trained",
        )
        return True

    def _uniforms(self, num_rows: int, params: SamplingParams) -> Tensor | None:
        """[rows, max_tokens] float64 in [0, 1), on the CPU; none for greedy decoding."""
        if params.temperature == 0:
            return None
        generator = self._generator
        if params.seed is not None:
            generator = torch.Generator().manual_seed(params.seed)
        return torch.rand(num_rows, params.max_tokens, dtype=torch.float64, generator=generator)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(next(self.model.parameters()).device.type, dtype=self.autocast)

    def most_at_once(self, tokens: int) -> int:
        """See ``Engine.most_at_once``."""
        return self.max_batch_tokens // tokens

    @contextmanager
    def standby(self) -> Iterator[None]:
        """The KV cache dies with each call; what is given back here is the
        GPU memory that PyTorch's allocator still holds for it."""
        check_awake(self._state, "standby")
        self._state = "standby"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        try:
            yield
        finally:
            self.wake()

    def wake(self) -> None:
        if self._state == "standby":
            self._state = "awake"

    def update_weights(self, *, policy_version: int) -> None:
        """Only the version is news: the model is the trainer's own."""
        self.policy_version = newer(policy_version, self.policy_version)

    update_lora = update_weights

    def state_dict(self) -> dict[str, Any]:
        """The generator's state is a uint8 tensor."""
        return {"generator": self._generator.get_state(), "policy_version": self.policy_version}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, {"generator", "policy_version"})
        self._generator.set_state(state["generator"])
        self.policy_version = int(state["policy_version"])

    def close(self) -> None:
        """The model is the caller's and stays."""
        self._state = "closed"


@dataclass(frozen=True, slots=True)
class Group:
    """``count`` completions of prompt number ``prompt``, numbered from ``first``."""

    prompt: int
    first: int
    count: int


def plan_microbatches(
    lengths: Sequence[int],
    n: int,
    limits: Sequence[int],
    max_batch_tokens: int,
    *,
    only: Sequence[int],
    pad: bool,
) -> list[list[Group]]:
    """Groups the prompts ``only`` of like length; each of their ``n`` completions appears once.

    A batch of R rows whose longest prompt has L tokens costs R * (L + limit) tokens of KV cache,
    padding included, with the largest of the ``limits`` of completions (unless only its own fits,
    which then is a batch for each row). Longest first: if memory is short, it shows at once and not
    after an hour. The completions of one prompt are split over batches only where they do not fit
    into one. With ``pad`` prompts of different lengths may share a batch.
    """
    batches: list[list[Group]] = []
    free = width = 0  # rows that still fit; the first prompt is the longest and so sets the width
    most = max((limits[i] for i in only), default=0)
    for prompt in sorted(only, key=lambda i: -lengths[i]):
        length, limit = lengths[prompt], limits[prompt]
        fits_alone = length + limit <= max_batch_tokens
        capacity = max_batch_tokens // (length + most) or int(fits_alone)
        if capacity < 1:
            raise PromptError(
                f"prompt {prompt} has {length} tokens and with max_tokens={limit} "
                f"does not fit into max_batch_tokens={max_batch_tokens}; raise the latter"
            )
        done = 0
        while (left := n - done) > 0:
            splits = free < left <= capacity
            if free == 0 or splits or not (pad or width == length):
                batches.append([])
                free, width = capacity, length
            count = min(left, free)
            batches[-1].append(Group(prompt, done, count))
            done += count
            free -= count
    return batches


def build(spec: EngineSpec) -> Built:
    """The trainer's model, and the engine that samples with it."""
    model, tokenizer = spec.load()
    model = spec.trainable(model)
    engine = TorchEngine.from_tokenizer(model, tokenizer, seed=spec.seed, autocast=spec.autocast)
    return Built(model, tokenizer, engine)
