"""What a run learns from: rows that are read and checked, as tokens, with all that judges them.

No model is loaded for it: what does not fit the configuration is told before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxrl.distributed import Ranks
from fxrl.engines import Engine
from fxrl.errors import check_one_of
from fxrl.losses.own_code import load_function
from fxrl.rl.config.tables import TrainConfig
from fxrl.rl.data.examples import FORMS, ExampleBuilder, Examples, Unit
from fxrl.rl.data.questions import (
    PromptBuilder,
    Split,
    question_text,
    read_source,
    split_rows,
)
from fxrl.rl.data.rewards import GIVEN, Reward, build_rewards, check_answer, check_arguments
from fxrl.rl.data.verifiers import Environment
from fxrl.rl.errors import BadConfigError, DataError
from fxrl.rl.loop import fingerprint
from fxrl.rl.report.files import Tell
from fxrl.rl.report.progress import Stage
from fxrl.rl.rollout.chat import Chat
from fxrl.rl.rollout.function import RolloutFunction
from fxrl.rl.rollout.rollouter import Player, Rollouter
from fxrl.rl.rollout.tools import Tools, user_code
from fxrl.rl.rollout.turns import Conversation
from fxrl.rl.rollout.verifiers import VerifiersPlayer
from fxrl.rl.types import Row


@dataclass(frozen=True, slots=True)
class Questions:
    """Data and rewards of a run that draws completions; no model is needed for them."""

    split: Split
    rewards: list[Reward]
    builder: PromptBuilder
    longest: int  # tokens of the longest prompt, or the limit if prompts may grow
    fingerprints: Mapping[str, str]  # of the data, the rewards, the loss and the tools, by name
    columns: tuple[str, ...] = ()  # that rewards get; some rows may lack them
    conversation: Conversation | None = None  # plays the rollouts, if there are tools
    environment: Environment | None = None  # of verifiers, which then plays the rollouts
    grow: bool = False  # an environment may extend prompts

    @property
    def tokenizer(self) -> Any:
        """What made the prompts' tokens."""
        return self.builder.tokenizer

    def source(
        self, engine: Engine, config: TrainConfig, tokenizer: Any, stage: Stage, ranks: Ranks
    ) -> Rollouter:
        player: Player | None = self.conversation
        if self.conversation is not None:
            self.conversation.tools.check_ranks(self.rewards, ranks.size)
        elif (function := config.rollout.rollout_func) is not None:
            player = RolloutFunction(function, self.builder, engine, ranks)
        elif self.environment is not None:
            player = VerifiersPlayer(self.environment, self.builder, config.rollout)
        return Rollouter(
            engine,
            self.builder,
            self.rewards,
            config,
            tokenizer,
            stage,
            columns=self.columns,
            longest=self.longest,
            player=player,
            ranks=ranks,
        )


def read_data(config: TrainConfig, tokenizer: Any, tell: Tell) -> Questions | Examples:
    """Read and check the data; loads no model. Raises ``DataError`` if it does not fit the
    configuration, ``BadConfigError`` if ``eval.reward`` names no reward."""
    read = read_examples if config.form in FORMS else read_questions
    return read(config, tokenizer, tell)


def read_questions(config: TrainConfig, tokenizer: Any, tell: Tell) -> Questions:
    """Questions with their rewards; every prompt is made once. See ``read_data``."""
    data = config.data
    rows = _Rows(config, tell, prompts=True)
    source, environment = rows.source, rows.source.environment
    split = rows.split(functools.partial(question_text, data, source.prompt))
    builder = PromptBuilder(data, source.prompt, split.shots, tokenizer)
    conversation = _conversation(config, builder)
    lengths: list[int] = []

    def fits(row: Row) -> None:
        tools = conversation.tools.schemas_of(row) if conversation is not None else ()
        lengths.append(len(builder.encode(builder.prompt(row), tools)))

    train, held_out = (tuple(rows.usable(part, fits)) for part in (split.train, split.held_out))
    split = Split(train, held_out, split.shots)
    rewards = build_rewards(config.reward, data.answer, source.score)
    if conversation is not None:
        rewards += conversation.tools.rewards(config.reward)
    if environment is not None:
        rewards += environment.rewards(config.reward)
    names = [reward.name for reward in rewards]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise BadConfigError(f"two rewards are named {twice[0]!r}; rename the environment's class")
    if not rewards:
        raise BadConfigError(
            "reward.functions is empty, and no environment has get_reward; give one of them"
        )
    if config.eval.reward is not None:
        check_one_of("eval.reward", config.eval.reward, names, BadConfigError)
    columns = rows.columns()
    further = conversation, config.rollout.rollout_func, environment
    if all(one is None for one in further):  # which may give columns of their own
        check_arguments(rewards, columns)
        check_answer(config.reward, data.answer, columns)
    grow = environment is not None or (conversation is not None and bool(conversation.tools.kinds))
    longest = data.max_prompt_tokens if grow else max(lengths)
    said, players = rows.fingerprints(rewards), (conversation, environment)
    return Questions(split, rewards, builder, longest, said, columns, *players, grow)


def read_examples(config: TrainConfig, tokenizer: Any, tell: Tell) -> Examples:
    """Rows that are trained on as they are, as tokens. See ``read_data``."""
    rows = _Rows(config, tell, prompts=False)
    builder = ExampleBuilder(config.data, config.form, rows.source.prompt, tokenizer)
    split = rows.split(builder.text_of)
    units: dict[int, Unit] = {}

    def fits(row: Row) -> None:
        units[id(row)] = builder.unit(row)

    train, held_out = (
        tuple(units[id(row)] for row in rows.usable(part, fits))
        for part in (split.train, split.held_out)
    )
    size, said = FORMS[config.form].size, rows.fingerprints(())
    return Examples(Split(train, held_out), tokenizer, config.prompts_per_step, size, said)


MOST_NAMED = 5
"""Unusable rows that a message names."""


class _Rows:
    """The rows of ``[data]``, and those of ``[eval]`` if it has a source of its own."""

    def __init__(self, config: TrainConfig, tell: Tell, *, prompts: bool) -> None:
        self._config, self._tell = config, tell
        own = config.eval.source(config.data)
        self.source = read_source(config.data, prompts=prompts)
        self._asked = None if own is None else read_source(own, prompts=prompts)
        self._all = [self.source] if self._asked is None else [self.source, self._asked]
        pairs = (pair for one in self._all for pair in zip(one.rows, one.places, strict=True))
        self._places = {id(row): place for row, place in pairs}

    def usable(self, rows: Sequence[Row], check: Callable[[Row], object]) -> list[Row]:
        """The rows of which ``check`` raises no ``DataError``, as ``data.unusable_rows`` says."""
        good, wrong = [], []
        for row in rows:
            try:
                check(row)
                good.append(row)
            except DataError as error:
                wrong.append(f"{self._places[id(row)]}: {error}")
        if not wrong:
            return good
        more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
        lines = "".join(f"\n  {line}" for line in [*wrong[:MOST_NAMED], *more])
        told = f"data: {len(wrong)} of {len(rows)} rows are unusable"
        if self._config.data.unusable_rows == "error":
            raise DataError(
                f"{told}:{lines}\ncorrect them, or leave them out: add data.unusable_rows=skip to "
                'the command, or unusable_rows = "skip" under [data]'
            )
        if not good:
            raise DataError(f"{told}, and no other is left:{lines}")
        self._tell(f"{told} and left out:{lines}")
        return good

    def split(self, text_of: Callable[[Row], str]) -> Split:
        """Rows to train on and held-out ones, without those that have no ``text_of``."""
        data, asked = self._config.data, self._asked
        rows = self.usable(self.source.rows, text_of)
        split = split_rows(
            rows,
            text_of,
            held_out=() if asked is None else self.usable(asked.rows, text_of),
            num_held_out=self._config.eval.size if asked is None else 0,
            num_shots=data.few_shot,
            seed=data.seed,
        )
        if asked is not None and (left := len(rows) - len(split.train) - len(split.shots)):
            self._tell(
                f"data: {left} of {len(rows)} rows ask what [eval] or an example asks, and are "
                "left out"
            )
        return split

    def columns(self) -> tuple[str, ...]:
        """Those that rewards get; says which ones they do not get under their name."""
        named = dict.fromkeys(str(name) for one in self._all for row in one.rows for name in row)
        for name in GIVEN:
            if name in named:
                self._tell(
                    f"data: rewards get the run's own {name!r}; that column of the data is in "
                    "their argument 'rows'"
                )
        return tuple(name for name in named if name != "prompt")

    def fingerprints(self, rewards: Sequence[Reward]) -> dict[str, str]:
        """Of the rows, and of the code that judges them."""
        names = ("data", "eval data")[: len(self._all)]
        found = {n: fingerprint.of_rows(one.rows) for n, one in zip(names, self._all, strict=True)}
        functions = {f"reward {reward.name}": reward.function for reward in rewards}
        if ":" in (loss := self._config.loss.name):
            functions[f"loss {loss}"] = load_function(loss)
        functions |= user_code(self._config.rollout)
        if self.source.environment is not None:
            functions["verifiers"] = type(self.source.environment.env.taskset)
        code = {name: fingerprint.of_code(function) for name, function in functions.items()}
        return found | {name: said for name, said in code.items() if said is not None}


def _conversation(config: TrainConfig, builder: PromptBuilder) -> Conversation | None:
    if not config.rollout.has_tools:
        return None
    keywords, template = config.data.chat_template_kwargs, config.rollout.response_template
    chat = Chat(builder.tokenizer, keywords, template)
    most_calls = config.rollout.max_tool_calling_iterations
    return Conversation(Tools(config.rollout), chat, builder, most_calls)
