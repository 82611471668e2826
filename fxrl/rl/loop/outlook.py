"""What a run takes, said before it starts: what stays, the rollout, the update, the host.

    rollout   weights | optimizer's states | engine | KV cache
    update    weights | optimizer's states | engine | what the planner predicts

On a GPU the update is planned for the largest micro-batch, with the KV cache given back as it is
then; of several ranks the first makes that plan, from the least memory of any. On a CPU nothing is
planned, unless ``fxrl.gpu_memory`` bounds it, and sizes are all there is to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fxrl import TrainStep
from fxrl.dtypes import wide_dtype
from fxrl.engines.kv_cache import RolloutMemory, held_bytes, training_bytes
from fxrl.engines.ledger import ledger_of
from fxrl.errors import FxrlError, first_line
from fxrl.ir.remark import format_bytes
from fxrl.models.host_embedding import held_on_host
from fxrl.models.lora import is_adapted
from fxrl.rl.loop.batching import make_batches
from fxrl.rl.loop.build import RunParts, prompts_each
from fxrl.rl.types import Batch, TokenRow


def outlook(parts: RunParts) -> Iterator[str]:
    """Lines of at most 80 columns; what cannot be said is said to be so."""
    if parts.ranks.size > 1:
        yield f"ranks: {parts.ranks.size}, each as follows"
    try:
        unit = parts.source.largest()
        tokens = max(sum(row.lengths) for row in unit)
        yield from _stays(parts)
        if parts.source.draws:
            yield from _rollout(parts, tokens)
    except FxrlError as error:
        yield f"plan: the rollout's memory is not known: {error}"
        return
    yield from _update(parts, unit, tokens)


def share_limits(parts: RunParts) -> None:
    """Lets all ranks plan from the same (``TrainStep.plan_within``)."""
    step = parts.updater.step
    if parts.ranks.size > 1 and isinstance(step, TrainStep):
        limits = step.limits()
        budget = replace(limits.budget, state_shards=parts.updater.state_shards)
        step.plan_within(parts.ranks.gather(limits._replace(budget=budget)))


def _asked(parts: RunParts) -> int:
    """Sequences of a step that one rank has."""
    return prompts_each(parts.config, parts.ranks) * parts.source.rows_each


def _stays(parts: RunParts) -> Iterator[str]:
    weights, states = training_bytes(parts.model, parts.updater.state_shards)
    words = f"{format_bytes(weights)} of weights and {format_bytes(states)} of optimizer"
    yield f"plan: {words} (as AdamW has) stay"
    if hosted := held_on_host(parts.model):
        yield f"  and {format_bytes(hosted)} of embeddings in host memory"
    if parts.teacher is not None:
        yield f"  and {format_bytes(held_bytes(parts.teacher))} of the teacher"
    if parts.updater.sharded:
        yield "  a rank has the optimizer of its share (ZeroRedundancyOptimizer)"
    elif parts.ranks.size > 1:
        why = "it is an adapter's" if is_adapted(parts.model) else "the weights' dtypes differ"
        yield f"  every rank has all of the optimizer: {why}"


def _rollout(parts: RunParts, tokens: int) -> Iterator[str]:
    asked = _asked(parts)
    device = next(parts.model.parameters()).device
    held = RolloutMemory.of(
        parts.model,
        tokens,
        min(asked, parts.engine.most_at_once(tokens)),
        available=_memory(device),
        dtype=parts.config.model.autocast_dtype,
        state_shards=parts.updater.state_shards,
    )
    yield f"rollout: {held.sequences} of {asked} sequences of up to {tokens} tokens at once"
    if (ledger := ledger_of(parts.engine)) is None:
        yield f"  {format_bytes(held.kv_bytes)} of KV cache, gone when it ends"
        return
    built = ledger.entries("load")[-1]
    own = format_bytes(built.engine_other)
    yield f"  awake: {format_bytes(built.kv_cache)} of KV cache, {own} of the engine's own"
    yield f"  asleep, for the update: {own}; the KV cache is given back"


def _memory(device: torch.device) -> int:
    """Bytes that the device has in all for this process."""
    if device.type == "cuda":
        share = torch.cuda.get_per_process_memory_fraction(device)
        return int(share * torch.cuda.mem_get_info(device)[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _update(parts: RunParts, unit: Sequence[TokenRow], tokens: int) -> Iterator[str]:
    config, asked = parts.config, _asked(parts)
    units = min(asked, config.micro_batch_tokens // tokens) // len(unit)
    rows = max(1, units) * len(unit)
    device = next(parts.model.parameters()).device
    what = f"update: micro-batches of up to {rows} x {tokens} tokens"
    if not isinstance(parts.updater.step, TrainStep):
        yield f"{what}, not planned: optimize=false"
        return
    if device.type != "cuda" and config.fxrl.gpu_memory is None:
        yield f"{what}; on a CPU nothing is planned"
        return
    plan, why = None, ""
    with parts.engine.standby():
        share_limits(parts)
        try:
            if parts.ranks.primary:
                plan = parts.updater.step.plan_for(
                    _batch(parts, unit, rows, device), accumulated=asked > rows
                )
        except Exception as error:  # a run needs no prediction
            why = first_line(error)
    plan, why = parts.ranks.broadcast((plan, why))
    if plan is None:
        yield f"{what}, not planned: {why}"
        return
    top = max(plan.timeline, key=lambda moment: moment.bytes)
    yield what
    yield f"  {format_bytes(top.bytes)} on the GPU at the highest, in {top.where}"
    yield f"  {format_bytes(plan.peak_host_bytes or 0)} on the host; {plan.step_seconds:.3g} s each"
    if plan.max_context is not None:
        yield f"  {rows} rows of up to {plan.max_context} tokens would fit"


def _batch(parts: RunParts, unit: Sequence[TokenRow], rows: int, device: torch.device) -> Batch:
    """A micro-batch of so many rows, as the trainer makes them."""
    dtype = wide_dtype(next(parts.model.parameters()).dtype)
    many = [*unit] * (rows // len(unit))
    [batch] = make_batches(many, [range(rows)], pad_token_id=0, device=device, dtype=dtype)
    scorers = parts.scorers
    scored = {"old_logps": scorers.old_policy, "ref_logps": scorers.reference}
    names = [name for name, scorer in scored.items() if scorer is not None]
    if scorers.critic is not None:
        names += ["old_logps", "values", "advantages", "returns"]
        del batch["rewards"]
    return batch | dict.fromkeys(names, torch.zeros_like(batch["completion_mask"]))
