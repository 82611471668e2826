"""One step of the loop: roll out, score, update, hand the policy over.

NOTE [What a failing step leaves]
Until its first optimizer update a step changes nothing but random states and the data position,
which were noted when it began: a reward function that raises in step 7 leaves a checkpoint of
step 6, and the resumed run draws the same completions of step 7 again. Once all its updates are
made, the step is done: an engine that does not come back afterwards leaves a checkpoint of step 7.
Between two updates of one step (``num_iterations`` above 1) there is no state to go on from, and
the last checkpoint counts.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.drift import measured, probe_rows
from fxrl.rl.loop.batching import make_batches, padding_fraction, plan_micro_batches
from fxrl.rl.loop.build import RunParts
from fxrl.rl.report.timing import Clock
from fxrl.rl.rollout.rollouter import TrainerState
from fxrl.rl.types import Batch, Metrics, Rollout, Row


class TrainingIteration:
    """TrainingIteration ``number`` of a run.

    Args:
        first: of this process, so the train step is captured in it.

    Attributes:
        updated: a weight has changed.
        trained: all updates are made.
        record: the step's metrics, so far.
        rollout: its completions, once they are there.
        engine_state: the sampler's, after them.
    """

    def __init__(self, config: TrainConfig, parts: RunParts, number: int, *, first: bool) -> None:
        self.config, self.parts, self.number, self.first = config, parts, number, first
        self.device = next(parts.model.parameters()).device
        self.clock = Clock(self.device)
        self.updated = self.trained = False
        self.record: dict[str, Any] = {"step": number}
        self.rollout: Rollout | None = None
        self.engine_state: dict[str, Any] = {}

    def run(self) -> Rollout:
        """The whole step.

        Raises:
            FxrlError: something failed; the attributes say how far it got.
        """
        clock, parts, config = self.clock, self.parts, self.config
        rollout = self.rollout = parts.rollouter.rollout(self._take, self._state, clock)
        self.engine_state = parts.engine.state_dict()
        with ExitStack() as standby:
            with clock.phase("release"):
                standby.enter_context(parts.engine.standby())
            with clock.phase("score"), parts.stage("scoring: micro-batches, old log-probs"):
                batches = self._batches(rollout)
            tokens = f"{rollout.num_tokens} tokens"
            first = ", and the step is captured" if self.first else ""
            with clock.phase("train"), parts.stage(f"training: {tokens}{first}"):
                updates = self._updates(batches)
            self.trained = True
            self.record |= mean_of(updates) | rollout.metrics
            with clock.phase("wake"):
                standby.close()
        with clock.phase("sync"):
            hand_over(config, parts, parts.engine.policy_version + 1)
        self.add_times()
        return rollout

    def add_times(self) -> None:
        """Puts the seconds up to now into the record."""
        seconds = self.clock.elapsed()
        self.record |= self.clock.metrics()
        self.record["step_time"] = seconds
        if self.rollout is not None:
            self.record["tokens_per_second"] = self.rollout.num_completion_tokens / seconds
        self.record |= {f"engine/{k}_s": v for k, v in self.parts.engine.timings.items()}
        if self.device.type == "cuda":
            self.record["memory/peak_bytes"] = torch.cuda.max_memory_allocated()

    def _take(self, count: int) -> list[Row]:
        rows = self.parts.questions.split.train
        return [rows[i] for i in self.parts.stream.take(count)]

    def _state(self) -> TrainerState:
        return TrainerState(self.number, self.config.steps, self.parts.stream.epoch)

    def _batches(self, rollout: Rollout) -> list[Batch]:
        """Micro-batches with the log-probabilities that the loss compares with."""
        lengths = [(len(c.prompt_token_ids), len(c.token_ids)) for c in rollout.completions]
        if not lengths:
            return []
        plan = plan_micro_batches(lengths, self.config.micro_batch_tokens)
        parameter = next(self.parts.model.parameters())
        make = functools.partial(
            make_batches,
            rollout.completions,
            rollout.advantages,
            pad_token_id=self.parts.tokenizer.pad_token_id,
            device=self.device,
            dtype=torch.promote_types(parameter.dtype, torch.float32),
        )
        batches = make(plan)
        self.record["padding/fraction"] = padding_fraction(lengths, plan)
        self.record["padding/micro_batches"] = len(plan)
        for batch in batches:
            if self.parts.old_policy is not None:
                batch["old_logps"] = self.parts.old_policy(batch)
            if self.parts.reference is not None:
                batch["ref_logps"] = self.parts.reference(batch)
        if self.parts.probe is not None:
            rows = probe_rows(plan, [sum(pair) for pair in lengths])
            [batch] = make([rows])
            self.record |= measured(self.parts.probe(batch), batch)
        return batches

    def _updates(self, batches: list[Batch]) -> list[Metrics]:
        updater = self.parts.updater
        if not batches:  # dynamic sampling has dropped every group
            return [updater.no_update()]
        found = []
        for _ in range(self.config.num_iterations):
            found.append(updater.update(batches, self.number))
            self.updated = True
        return found


def hand_over(config: TrainConfig, parts: RunParts, version: int) -> None:
    """Makes the trainer's present weights those that the engine draws with."""
    update: Callable[..., None] = parts.engine.update_weights
    if config.model.lora is not None:
        update = parts.engine.update_lora
    update(policy_version=version)


def mean_of(updates: list[Metrics]) -> Metrics:
    """Metrics of one step's updates as one; ``None`` where no update has a value."""
    if len(updates) == 1:
        return updates[0]
    merged: Metrics = {}
    for name in updates[0]:
        values = [v for update in updates if (v := update.get(name)) is not None]
        merged[name] = statistics.fmean(values) if values else None
    return merged
