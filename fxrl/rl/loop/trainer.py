"""The loop: steps, what they say, evaluation, checkpoints.

NOTE [What a failing step leaves]
Until its first optimizer update a step changes nothing but random states and the data position,
which were noted when it began: a reward function that raises in step 7 leaves a checkpoint of
step 6, and the resumed run draws the same completions of step 7 again. Once all its updates are
made, the step is done: an engine that does not come back afterwards leaves a checkpoint of step 7.
Within an update, and between two of one step (``num_iterations`` above 1), there is no state to go
on from, and the last checkpoint counts; so it does where the ranks share out the optimizer's states
and one is gone with its part. A step ends when all that it has to say is written and shown: what
fails there, or calls ``sys.exit``, leaves a checkpoint of that step.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fxrl import TrainStep
from fxrl.distributed import RankError
from fxrl.engines.ledger import ledger_of
from fxrl.errors import ConfigError, FxrlError, reason_of
from fxrl.files import write_text
from fxrl.rl.config.load import as_table
from fxrl.rl.drift import DriftWatch
from fxrl.rl.errors import StorageError, in_words
from fxrl.rl.loop import checkpoint, store
from fxrl.rl.loop.build import RunParts
from fxrl.rl.loop.fingerprint import check_unchanged
from fxrl.rl.loop.interrupt import StopRequest
from fxrl.rl.loop.iteration import TrainingIteration, hand_over, scored_batches
from fxrl.rl.loop.outlook import share_limits
from fxrl.rl.report.files import COMPLETIONS, METRICS, JsonLines, keep_trying
from fxrl.rl.report.page import note, try_to_write_page
from fxrl.rl.types import Experience, Metrics, TrainerState

T = TypeVar("T")


class TrainingLoop:
    """Runs the steps of one run; ``done`` counts them.

    ``again`` says what goes on with it, for messages.
    """

    def __init__(self, parts: RunParts, again: str) -> None:
        self.config, self.parts, self.again = parts.config, parts, again
        self.run_dir = Path(self.config.run_dir)
        self.reporter = parts.reporter
        self.done = 0
        self.num_tokens = 0
        self.initial: Metrics = {}
        self._branch = store.next_branch(self.run_dir)
        self._parent: str | None = None
        self._start_of_step: dict[str, Any] = {}
        self._step_now: TrainingIteration | None = None
        self._reported = False
        self._save_due, self._saved = False, 0
        self._written = 0  # the last step in metrics.jsonl
        options = parts.updater.info.options
        corrected = None if options is None else options.vllm_importance_sampling_correction
        self._drift = DriftWatch(corrected)
        self._former_end: int | None = None  # `steps` of the run that is resumed
        self._most_bytes: dict[str, int] = {}

    def resume(self, path: Path, *, accept_changes: bool = False) -> None:
        """Resume from a checkpoint, in a new branch if it is not the last one of ``run_dir``; with
        ``accept_changes`` even if data, rewards or base model have changed. Raises
        ``CheckpointError`` if it is damaged or of another run, ``StorageError`` if the branch
        cannot be written."""
        saved = checkpoint.read_trainer(path)
        checkpoint.check_same_run(path, saved["config"], as_table(self.config))
        check_unchanged(path, saved["fingerprints"], self.parts.fingerprints, accept=accept_changes)
        optimizer, state = checkpoint.load_checkpoint(path, self.parts.model)
        with checkpoint.restoring(path, "optimizer.pt"):
            self.parts.updater.load_state_dict(optimizer)
        with checkpoint.restoring(path, "state.pt"):
            self.parts.engine.load_state_dict(state["engine"])
            checkpoint.set_random_state(state["random"])
        self.done, self.num_tokens = saved["step"], saved["num_tokens"]
        self.parts.stream.position = saved["position"]
        self.parts.updater.num_skipped = saved["num_skipped"]
        self.parts.updater.num_skipped_in_a_row = saved["num_skipped_in_a_row"]
        self.initial = saved["initial"]
        self._former_end = saved["config"]["steps"]
        if self.parts.ranks.primary:
            self._go_on_from(path, optimizer)

    def _go_on_from(self, path: Path, optimizer: Mapping[str, Any]) -> None:
        """Continue the branch of the last checkpoint, or begin a new one (``store``, Branches)."""
        own = [other.resolve() for other in checkpoint.list_checkpoints(self.run_dir)]
        if own and path.resolve() == own[-1]:
            self._branch, self._parent = store.read_manifest(path).branch, path.name
            store.prune(self.run_dir, self._branch, self.config.keep_checkpoints)
        else:
            self._parent = path.name if path.resolve() in own else str(path.resolve())
            store.set_lines_aside(self.run_dir)
            path = self.save(optimizer)
        store.take_lines_over(self.run_dir, path)

    def run(self, stop: StopRequest) -> None:
        """Run steps until ``config.steps``, ``stop`` or a callback ends it, then save. Raises
        ``FxrlError`` if a step fails; its state is saved if possible."""
        config, tell = self.config, self.reporter.message
        metrics = JsonLines(self.run_dir / METRICS, self.done, self._as_in_one_run, tell)
        completions = JsonLines(self.run_dir / COMPLETIONS, self.done, tell=tell)
        events, self._saved = self.parts.events, self.done
        try:
            hand_over(self.parts, self.parts.engine.policy_version)
            if (ledger := ledger_of(self.parts.engine)) is not None:
                tell(str(ledger))
            events("on_train_begin", self.now())
            if self.done == 0 and config.steps > 0 and not self.initial:
                with self._shared():
                    self._evaluate_untrained()
            while True:
                with self._rescued(metrics):
                    if self._ends(stop):
                        break
                    record, found = self._step()
                    metrics.write(record)
                    self._written = self.done
                    samples = found.samples(config.log_completions)
                    for sample in samples:
                        completions.write({"step": self.done, **sample})
                    events("on_log", self.now(), logs=record)
                    self._tell(record, samples)
                    last = self._ends(stop)
                self._save_if_due(last=last)
            # What asked for the end may have done so after the step's own question.
            if self.parts.ranks.broadcast(self._saved < self.done):
                self._save_if_due(last=True)
            self.for_sure(metrics.flush, str(metrics.path))
            self.for_sure(completions.flush, str(completions.path))
        finally:
            metrics.close()
            completions.close()

    def now(self) -> TrainerState:
        """What callbacks read of the run."""
        return TrainerState(self.done, self.config.steps, self.parts.stream.epoch)

    def _ends(self, stop: StopRequest) -> bool:
        """Whether no further step is wanted, the same on all ranks. A signal to one is one to all
        (what comes while they speak is heard next time); callbacks are asked on rank 0."""
        control = self.parts.events.control
        asked = self.parts.ranks.gather((stop.signum, control.should_training_stop))
        heard = [signum for signum, _ in asked if signum is not None]
        if heard:
            stop.signum = heard[0]
        control.should_training_stop = asked[0][1]
        return bool(heard) or control.should_training_stop or self.done >= self.config.steps

    def _tell(self, record: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        """What a step has to say to people."""
        self._tell_report()
        warnings = list(self.parts.source.warnings(record))
        # The embedded engine's model is the trainer's own: what differs is rounding.
        if self.config.engine == "vllm":
            warnings += filter(None, [self._drift.warning(record)])
        if record["nonfinite"]:
            skipped, most = self.parts.updater.num_skipped_in_a_row, self.config.max_nonfinite
            warnings.append(
                "loss or gradient was not finite, so an update was skipped "
                f"({skipped} in a row; max_nonfinite={most} end the run)"
            )
        for failure in self.parts.source.failures():
            self.reporter.message(failure)
        for warning in warnings:
            self.reporter.message(f"step {self.done}: {warning}")
        self.reporter.step(record, samples)

    def _save_if_due(self, *, last: bool) -> None:
        """At the end for sure; else a full disk only puts it off to after the next step."""
        events, every = self.parts.events, self.config.save_every
        due = self._save_due or events.asked("save") or (every and self.done % every == 0)
        if not self.parts.ranks.broadcast(last or due):
            return
        optimizer = self.parts.updater.state_dict()
        if last:
            path = self.for_sure(lambda: self.save(optimizer), "the checkpoint")
            self._saved = self.done
            events("on_save", self.now(), path=path)
        else:
            try:
                path = self.save(optimizer)
                self._save_due, self._saved = False, self.done
                events("on_save", self.now(), path=path)
                self.write_page()
            except StorageError as error:
                self._save_due = True
                told = f"{error}; the run goes on, and tries again after the next step"
                self.reporter.message(told)

    def for_sure(self, action: Callable[[], T], what: str) -> T:
        retries, wait_s = self.config.disk_retries, self.config.disk_wait_s
        return keep_trying(action, what, self.reporter.message, retries=retries, wait_s=wait_s)

    def _state(self) -> dict[str, Any]:
        return {
            "engine": self.parts.engine.state_dict(),
            "random": checkpoint.random_state(),
            "position": self.parts.stream.position,
        }

    def save(self, optimizer: Mapping[str, Any], state: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint of ``state`` (None: the present one) with ``updater.state_dict()``,
        which all ranks call. Only rank 0 writes: the others have the same."""
        if not self.parts.ranks.primary:
            return self.run_dir
        state = state or self._state()
        updater = self.parts.updater
        trainer = {
            "position": state["position"],
            "num_tokens": self.num_tokens,
            "num_skipped": updater.num_skipped,
            "num_skipped_in_a_row": updater.num_skipped_in_a_row,
            "initial": self.initial,
            "config": as_table(self.config),
            "fingerprints": self.parts.fingerprints,
        }
        with self.reporter.stage("saving: a checkpoint"):
            path = checkpoint.save_checkpoint(
                self.run_dir,
                self.done,
                branch=self._branch,
                parent=self._parent,
                model=self.parts.model,
                tokenizer=self.parts.tokenizer,
                optimizer=optimizer,
                state={name: state[name] for name in ("engine", "random")},
                trainer=trainer,
                keep=self.config.keep_checkpoints,
            )
        self._branch, self._parent = store.read_manifest(path).branch, path.name
        return path

    @contextmanager
    def _rescued(self, metrics: JsonLines) -> Iterator[None]:
        """Around one step: if it fails, what it has reached is saved (``TrainingIteration``)."""
        self._start_of_step, self._step_now = self._state(), None
        try:
            with self._shared():
                yield
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            self._rescue(error, metrics)
            raise

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Around work that ranks sharing sequences do together: if it fails here, the others are
        told, and do not wait for this rank."""
        ranks, step = self.parts.ranks, self.parts.updater.step
        if self.config.fxrl.context_parallel == 1 or not isinstance(step, TrainStep):
            yield
            return
        try:
            with ranks.watched():
                yield
        except BaseException as error:
            if not isinstance(error, RankError):
                ranks.fail(in_words(error))
            step.leave()
            raise

    def _rescue(self, error: BaseException, metrics: JsonLines) -> None:
        """Saves the last state there is to go on from, and says so in a note of ``error``; on rank
        0, as ``save``."""
        step, state = self._step_now, self._start_of_step
        number = self.done + 1 if step is None else step.number
        if step is not None and step.updated and not step.trained:
            why_not = f"step {number} failed between two of its updates, or in one"
        else:
            optimizer, why_not = self._state_of_failed(error)
        if not self.parts.ranks.primary:
            return
        if why_not:
            error.add_note(f"{why_not}; what is left is the last checkpoint; {self.again}")
            return
        if step is not None and step.updated and step.experience is not None:
            state = state | {
                "engine": step.engine_state,
                "random": checkpoint.random_state(),
                "position": self.parts.stream.position,
            }
            if self.done < number:  # else only what comes after it has failed
                self.done = number
                self.num_tokens += step.experience.num_tokens
                step.add_times()
            epoch = self.parts.stream.epoch
            if self._written < number:
                metrics.write(step.record | {"num_tokens": self.num_tokens, "epoch": epoch})
            which = " after its updates; the state with them"
        else:
            which = "; the state before it"
        try:
            saved = self.for_sure(lambda: self.save(optimizer, state), "the checkpoint")
            metrics.flush()
        except (FxrlError, OSError) as failure:
            error.add_note(
                f"step {number} failed, and its state could not be saved: {reason_of(failure)}"
            )
            return
        self.write_page()
        text = f"step {number} failed{which} is in {saved}".replace(" ;", ";")
        error.add_note(f"{text}; {self.again}")

    def _state_of_failed(self, error: BaseException) -> tuple[dict[str, Any], str]:
        """The optimizer's state behind a failure; or why there is none, in words."""
        ranks, updater = self.parts.ranks, self.parts.updater
        try:
            if updater.sharded:
                ranks.regroup(None if isinstance(error, RankError) else in_words(error))
            return updater.state_dict(), ""
        except RankError as failure:
            return {}, f"the optimizer's states are on all ranks, of which one is gone ({failure})"

    def _step(self) -> tuple[dict[str, Any], Experience]:
        number, events = self.done + 1, self.parts.events
        events("on_step_begin", self.now())
        step = self._step_now = TrainingIteration(self.parts, number)
        found = step.run()
        step.add_of_all_ranks()
        share_limits(self.parts)
        self.num_tokens += found.num_tokens
        self.done = number
        for phase, used in step.clock.bytes.items():
            self._most_bytes[phase] = max(used, self._most_bytes.get(phase, 0))
        record = step.record
        record |= {"num_tokens": self.num_tokens, "epoch": self.parts.stream.epoch}
        if number == 1:
            record |= self.initial
        events("on_step_end", self.now(), logs=record)
        asked = events.asked("evaluate") or self._evaluation_due(number)
        if self.parts.ranks.broadcast(asked):
            record |= self._evaluate()
        return record, found

    def _evaluation_due(self, number: int) -> bool:
        config = self.config.eval
        last = number == self.config.steps or self.parts.events.control.should_training_stop
        due = last or (config.every and number % config.every == 0)
        return bool(self.parts.data.split.held_out and due)

    def _as_in_one_run(self, line: dict[str, Any]) -> dict[str, Any]:
        """A line without the evaluation of what was the last step until ``steps`` was raised."""
        if line["step"] != self._former_end or self._evaluation_due(line["step"]):
            return line
        initial = self.initial if line["step"] == 1 else {}
        return {k: v for k, v in line.items() if not k.startswith("eval/") or k in initial}

    def _evaluate(self) -> Metrics:
        rows = self.parts.data.split.held_out
        if not rows:
            raise ConfigError("a callback asks for an evaluation; [eval] holds out nothing")
        with self.reporter.stage(f"evaluating: {len(rows)} held-out questions") as say:

            def measure(experience: Experience) -> Metrics:
                batches, _ = scored_batches(self.parts, experience, say, train=False)
                return self.parts.updater.measure(self.parts.scorers.judge, batches)

            found = self.parts.source.evaluate(rows, self.now(), measure)
        self.parts.events("on_evaluate", self.now(), metrics=found)
        return found

    def _evaluate_untrained(self) -> None:
        """Before the first step; written into its line as ``eval/initial_*``."""
        if not self.parts.data.split.held_out:
            return
        found = self._evaluate()
        self.parts.events("on_log", self.now(), logs=found)
        _, judged_by = self.parts.source.headline
        self.initial = {f"eval/initial_{judged_by}": found[f"eval/{judged_by}"]}
        if (baseline := "eval/majority_baseline") in found:
            self.initial[baseline] = found[baseline]

    def write_page(self) -> None:
        """``run.html``, of all that is on disk by now."""
        note(self.run_dir, self.reporter.message, memory=self._most_bytes)
        try_to_write_page(self.run_dir, self.reporter.message)

    def write_ledger(self) -> None:
        """``ledger.json``: the engine's account of the GPU's memory, an entry per transition; no
        run fails by it."""
        if (ledger := ledger_of(self.parts.engine)) is None:
            return
        text = ",\n".join(ledger.to_json().splitlines())
        try:
            write_text(self.run_dir / "ledger.json", f"[{text}]\n")
        except (OSError, FxrlError) as error:
            told = f"{self.run_dir}: {reason_of(error)}; the ledger is not written"
            self.reporter.message(told)

    def _tell_report(self) -> None:
        """Once per process, when the first step has been captured."""
        step = self.parts.updater.step
        if isinstance(step, TrainStep) and not self._reported:
            self.reporter.report(step.report)
            remarks = [dataclasses.asdict(remark) for remark in step.report.remarks]
            plan = json.loads(step.plan.to_json())
            note(self.run_dir, self.reporter.message, report=remarks, plan=plan)
        self._reported = True
