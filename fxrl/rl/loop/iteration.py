"""One step: rollouts, scores, updates, the new weights handed over."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from fxrl.dtypes import wide_dtype
from fxrl.engines.ledger import ledger_of
from fxrl.losses.reduce import masked_sum
from fxrl.models.lora import is_adapted
from fxrl.rl.drift import measured, probe_rows
from fxrl.rl.loop.advantages import add_advantages
from fxrl.rl.loop.batching import make_batches, padding_fraction, plan_ranks
from fxrl.rl.loop.build import RunParts
from fxrl.rl.loop.metrics import mean_of
from fxrl.rl.report.progress import Say, told
from fxrl.rl.report.timing import Clock
from fxrl.rl.types import Batch, Experience, Metrics, TokenRow, TrainerState


class TrainingIteration:
    """Step ``number`` of a run, and how far it has come."""

    def __init__(self, parts: RunParts, number: int) -> None:
        self.config, self.parts, self.number = parts.config, parts, number
        self.device = next(parts.model.parameters()).device
        ledger = ledger_of(parts.engine)
        self.clock = Clock(self.device, ledger.given_back) if ledger else Clock(self.device)
        self.trained, self._begun = False, parts.updater.num_begun  # all updates are made
        self.record: dict[str, Any] = {"step": number}
        self.experience: Experience | None = None  # what it trains on, once that is there
        self.engine_state: dict[str, Any] = {}  # the sampler's, after it

    @property
    def updated(self) -> bool:
        """Whether a weight has changed, or may have."""
        return self.parts.updater.num_begun > self._begun

    def run(self) -> Experience:
        """The whole step. Raises ``FxrlError`` if something fails; the attributes then say how far
        it got."""
        clock, parts, config = self.clock, self.parts, self.config
        stage, updater = parts.reporter.stage, parts.updater
        self._seed_other_ranks()
        found = self.experience = parts.source.experience(self._take, self._state, clock)
        self.engine_state = parts.engine.state_dict()
        parts.events("on_rollout_end", self._state(), rollout=found)
        with ExitStack() as standby:
            with clock.phase("release"):
                standby.enter_context(parts.engine.standby())
            what = "scoring: making micro-batches"
            with clock.phase("score"), stage(what) as say, told("fxrl", say):
                batches, padding = scored_batches(parts, found, say)
                self.record |= padding
            what = f"training: {found.num_tokens} tokens in micro-batches: {len(batches)}"
            with clock.phase("train"), stage(what) as say, told("fxrl", say):
                times = range(config.num_iterations)
                updates = [updater.no_update()]  # dynamic sampling may have dropped every group
                if found.rows:
                    updates = [updater.update(batches, self.number) for _ in times]
            self.trained = True
            self.record |= mean_of(updates) | found.metrics
            with clock.phase("wake"):
                standby.close()
        with clock.phase("sync"):
            hand_over(parts, parts.engine.policy_version + 1)
        self.add_times()
        return found

    def add_times(self) -> None:
        """Puts the seconds up to now into the record."""
        times = self.clock.metrics()
        self.record |= times
        if self.experience is not None:
            drawn = self.experience.num_completion_tokens
            self.record["tokens_per_second"] = drawn / times["step_time"]
        self.record |= {f"engine/{k}_s": v for k, v in self.parts.engine.timings.items()}
        if self.device.type == "cuda":
            self.record["memory/peak_bytes"] = max(self.clock.bytes.values(), default=0)

    def add_of_all_ranks(self) -> None:
        """What is another number on each rank: the most of any."""
        ranks = self.parts.ranks
        if ranks.size > 1:
            self.record |= {"ranks/wait_s": ranks.wait_s, "ranks/exposed_s": ranks.exposed_s}
            ranks.wait_s = ranks.exposed_s = 0.0
            names = [n for n in self.record if n.startswith(("ranks/", "memory/"))]
            each = ranks.gather([self.record[name] for name in names])
            self.record |= dict(zip(names, map(max, zip(*each, strict=True)), strict=True))

    def _seed_other_ranks(self) -> None:
        """Ranks' dropout must differ. Rank 0's generators go on as in a run of one, and are in its
        checkpoints; the others' follow from the step, so that a resumed run has them."""
        # Ranks that share a sequence must draw the same.
        if (rank := self.parts.ranks.rank // self.config.fxrl.context_parallel) > 0:
            name = f"{self.config.seed}/{self.number}/{rank}"
            torch.manual_seed(random.Random(name).getrandbits(63))

    def _take(self, count: int) -> list[Any]:
        rows = self.parts.data.split.train
        return [rows[i] for i in self.parts.stream.take(count)]

    def _state(self) -> TrainerState:
        return TrainerState(self.number, self.config.steps, self.parts.stream.epoch)


def hand_over(parts: RunParts, version: int) -> None:
    """Makes the trainer's present weights those that the engine draws with."""
    update: Callable[..., None] = parts.engine.update_weights
    if is_adapted(parts.model):
        update = parts.engine.update_lora
    update(policy_version=version)


def scored_batches(
    parts: RunParts, found: Experience, say: Say, *, train: bool = True
) -> tuple[list[Batch], Metrics]:
    """This rank's micro-batches with the log-probabilities that the loss compares with; without
    ``train``, only those of the reference."""
    rows, scorers = found.rows, parts.scorers
    if not rows:
        return [], {}
    plan, whole = _planned(parts, rows, found.unit)
    batches = _padded(parts, rows, plan)
    lengths = [row.lengths for row in rows]
    metrics: Metrics = {
        "padding/fraction": padding_fraction(lengths, whole),
        "padding/micro_batches": len(whole),
    }
    counts = dict(found.counts)
    if scorers.mismatched is not None:
        say("scoring: prompts with each other's answers")
        counts["kl"] = _mismatched_kl(parts, rows)
    for number, batch in enumerate(batches, 1):
        say(f"scoring: micro-batch {number} of {len(batches)}")
        if train and scorers.old_policy is not None:
            batch["old_logps"] = scorers.old_policy(batch)
        if train and scorers.critic is not None:
            batch["old_logps"], values = scorers.critic(batch)
            batch |= values
        if scorers.reference is not None and "ref_logps" not in batch:
            batch["ref_logps"] = scorers.reference(batch)
        batch |= {n: batch["num_sequences_in_batch"].new_tensor(v) for n, v in counts.items()}
    if train and (critic := parts.updater.info.critic) is not None:
        sharing = parts.config.fxrl.context_parallel
        metrics |= add_advantages(batches, critic, parts.ranks, sharing)
    if train and scorers.probe is not None:
        [batch] = _padded(parts, rows, [probe_rows(whole, [sum(pair) for pair in lengths])])
        metrics |= measured(scorers.probe(batch), batch)
    return batches, metrics


Plan = list[tuple[int, ...]]
"""Row numbers of micro-batches."""


def _planned(parts: RunParts, rows: Sequence[TokenRow], unit: int) -> tuple[Plan, Plan]:
    """This rank's micro-batches, and those of all ranks."""
    lengths = [row.lengths for row in rows]
    widest = [max(lengths[at : at + unit], key=sum) for at in range(0, len(rows), unit)]
    most = max(1, parts.config.micro_batch_tokens // unit)
    ranks, sharing = parts.ranks, parts.config.fxrl.context_parallel
    plans = [
        [tuple(at * unit + place for place in range(unit) for at in group) for group in plan]
        for plan in plan_ranks(widest, most, ranks.size // sharing)
    ]
    return plans[ranks.rank // sharing], [group for each in plans for group in each]


def _padded(parts: RunParts, rows: Sequence[TokenRow], plan: Plan) -> list[Batch]:
    parameter = next(parts.model.parameters())
    return make_batches(
        rows,
        plan,
        pad_token_id=parts.tokenizer.pad_token_id,
        device=parameter.device,
        dtype=wide_dtype(parameter.dtype),
    )


def _mismatched_kl(parts: RunParts, rows: Sequence[TokenRow]) -> float:
    """max(0, mean_i log pi(y_i-1 | x_i) - log pi_ref(y_i-1 | x_i)), KTO's estimate of the KL.

    NOTE [A KL of the whole step]
    It has no gradient, so it is taken before the loss, over all rows of the step: the loss then is
    the same however these are cut into micro-batches or dealt to ranks.
    """
    scorers = parts.scorers
    assert scorers.mismatched is not None
    assert scorers.reference is not None
    others = [rows[-1], *rows[:-1]]
    mixed = [
        row._replace(completion=other.completion, per_token=other.per_token)
        for row, other in zip(rows, others, strict=True)
    ]
    plan, _ = _planned(parts, mixed, 1)
    gaps = []
    for batch in _padded(parts, mixed, plan):
        gap = scorers.mismatched(batch) - scorers.reference(batch)
        gaps += masked_sum(gap, batch["completion_mask"] != 0).tolist()
    every = parts.ranks.every(gaps, parts.config.fxrl.context_parallel)
    return max(0.0, math.fsum(every) / len(every))
