"""fxrl's one-pass sampler in the place of vLLM's: same calls, same results' types.

``FastSampler`` stands in for ``model_runner.sampler`` of vLLM's V2 model runner and hands
everything on to the sampler it wraps, but for steps that ``sample`` can do: every request samples
by temperature alone and wants at most the log-probability of its own token, at that temperature.

NOTE [Which requests are plain]
A request is compared with vLLM's default ``SamplingParams``, field by field: those that shape no
probability may differ, all others, also ones of versions to come, must be at their default. What
needs the logits changed (top-k, penalties, bias, bad words, ...) so takes vLLM's path without being
listed. A grammar's mask is in the logits already. The verdict is made when the request arrives and
kept on the host: a step asks a NumPy array and no device.

NOTE [Two streams of noise]
vLLM's path and this one draw different tokens from one seed. A seeded request repeats its tokens as
long as the steps it is in take the same path, that is as long as no other request in the batch
needs vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Fields of ``SamplingParams`` that leave the distribution of a token as it is.
HARMLESS = frozenset(
    [
        "temperature",
        "seed",
        "n",
        "best_of",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "max_tokens",
        "logprobs",
        "flat_logprobs",
        "prompt_logprobs",
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "output_text_buffer_length",
        "structured_outputs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "stream_interval",
        "repetition_detection",
        "routed_experts_prompt_start",
        "skip_clone",
        "skip_reading_prefix_cache",
    ]
)
_OWN_MODULES = "vllm.v1.worker.gpu.sample."


class FastSampler:
    """vLLM's sampler ``inner`` with a faster way for plain requests (see the module).

    The others are vLLM's ``SamplerOutput``, ``LogprobsTensors``, ``get_num_sampled_and_rejected``
    and ``SamplingParams()``; ``sample`` is ``fxrl.kernels.sample.fused_sample``.
    """

    def __init__(
        self,
        inner: Any,
        sample: Callable[..., tuple[Tensor, Tensor]],
        output: Any,
        logprobs: Any,
        count: Callable[..., tuple[Tensor, Tensor]],
        default_params: Any,
        device: torch.device,
    ) -> None:
        self._inner, self._sample = inner, sample
        self._output, self._logprobs, self._count = output, logprobs, count
        self._default_params = default_params
        self._plain = np.zeros(len(inner.sampling_states.temperature.np), dtype=bool)
        rows = len(self._plain)
        # vLLM's own are in the host's memory, which each program of a kernel would read anew.
        self._temperature = torch.zeros(rows, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self._stale = True
        self._fits = sampler_fits(inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add_request(self, req_idx: int, *args: Any) -> None:
        """vLLM's own, and notes whether the request is plain."""
        self._inner.add_request(req_idx, *args)
        vocab = self._inner.sampling_states.vocab_size
        self._plain[req_idx] = is_plain(args[-1], self._default_params, vocab)
        self._stale = True

    def apply_staged_writes(self) -> None:
        """vLLM's own, and refreshes the device's temperatures and seeds if a request came."""
        self._inner.apply_staged_writes()
        if self._stale:
            states = self._inner.sampling_states
            self._temperature.copy_(states.temperature.gpu, non_blocking=True)
            self._seeds.copy_(states.seeds.gpu, non_blocking=True)
            self._stale = False

    def __call__(self, logits: Tensor, input_batch: Any) -> Any:
        """A step's tokens, as vLLM's sampler returns them (ranks of tokens are 0: not counted)."""
        requests = input_batch.idx_mapping_np
        fast = (
            self._fits
            and not self._stale
            and logits.shape[0] == len(requests)
            and bool(self._plain[requests].all())
        )
        if not fast:
            return self._inner(logits, input_batch)
        tokens, logprobs = self._sample(
            logits,
            self._temperature,
            self._seeds,
            input_batch.positions,
            state_rows=input_batch.expanded_idx_mapping,
            position_rows=input_batch.logits_indices,
        )
        wanted = self._inner.sampling_states.max_num_logprobs(requests) >= 0
        num_sampled, num_rejected = self._count(
            input_batch.seq_lens.new_ones(input_batch.num_reqs),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self._inner.req_states.prefill_len.gpu,
        )
        made = None
        if wanted:
            made = self._logprobs(
                logprob_token_ids=tokens.view(-1, 1),
                logprobs=logprobs.view(-1, 1),
                selected_token_ranks=torch.zeros_like(tokens),
            )
        return self._output(
            sampled_token_ids=tokens.view(-1, 1),
            logprobs_tensors=made,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def sampler_fits(inner: Any) -> bool:
    """Whether the wrapped sampler has no setting of its own that the fast path would ignore."""
    processors = getattr(inner, "logits_processors", ())
    return (
        type(inner).__name__ == "Sampler"  # a subclass of vLLM's does something else
        and inner.logprobs_mode == "processed_logprobs"
        and not inner.compute_nans
        and not getattr(inner, "use_fp64_gumbel", False)
        and not getattr(inner, "return_sampling_mask", False)
        and getattr(inner, "trace_replay_state", None) is None
        and all(type(processor).__module__.startswith(_OWN_MODULES) for processor in processors)
    )


def is_plain(params: Any, default: Any, vocab: int) -> bool:
    """Whether temperature alone shapes the request's tokens; see NOTE [Which requests are plain].

    ``params`` and ``default`` are vLLM's ``SamplingParams``; ``vocab`` is the number of tokens.
    """
    if params.logprobs not in (None, 0):
        return False
    for field in type(default).__struct_fields__:
        if field in HARMLESS or field.startswith("_"):
            continue
        value = getattr(params, field)
        if field == "top_k" and (value <= 0 or value >= vocab):
            continue
        if (value or None) != (getattr(default, field) or None):
            return False
    return True
