"""Where questions come from, which of them are held out, and how a row becomes a prompt's tokens.

A row is a plain dict: the dataset's columns. Reading a source never touches the model.
"""

from __future__ import annotations

import csv
import io
import json
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxrl.errors import did_you_mean, optional, shown
from fxrl.rl.config.binding import MOST_NESTED, TOO_DEEP, entries
from fxrl.rl.config.tables import DataConfig
from fxrl.rl.data.verifiers import Environment
from fxrl.rl.errors import DataError
from fxrl.rl.types import Row

DEFAULT_GYM_SIZE = 1000


@dataclass(frozen=True, slots=True)
class RowSource:
    """Rows of a data source, and what the source knows about judging them."""

    rows: tuple[Row, ...]
    prompt: str  # the name of the prompt's column
    places: tuple[str, ...]  # where each row stands, such as ``questions.jsonl:7``
    score: Callable[[str, Row], float] | None = None  # reasoning-gym's ``score(answer, row)``
    # Of ``data.verifiers``: plays and judges the rows.
    environment: Environment | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Three disjoint sets of rows, or of what is made of each: no question of one occurs in
    another."""

    train: tuple[Any, ...]
    held_out: tuple[Any, ...]
    shots: tuple[Row, ...] = ()


def read_source(config: DataConfig, *, prompts: bool = True) -> RowSource:
    """Read what ``[data]`` names; if ``prompts``, at least one row must have the prompt's column.
    Raises ``DataError`` if it cannot be read, is empty or lacks that column,
    ``MissingPackageError`` without datasets or reasoning-gym."""
    if config.reasoning_gym is not None:
        return _reasoning_gym(config, config.reasoning_gym)
    environment = None
    if config.verifiers is not None:
        environment = Environment.load(config.verifiers, config.size)
        rows, name = [*environment.rows], "data.verifiers"
        places = [f"{name}: task {row['task']}" for row in rows]
    elif config.rows is not None:
        rows, name = [dict(row) for row in config.rows], "data.rows"
        places = [f"{name}: row {number}" for number in range(1, len(rows) + 1)]
    elif config.path is not None:
        numbered, name = read_file(Path(config.path)), config.path
        rows = list(numbered.values())
        places = [f"{name}:{number}" for number in numbered]
    else:
        assert config.dataset is not None
        rows, name = _hub_dataset(config, config.dataset), config.dataset
        places = [f"{name}: row {number}" for number in range(1, len(rows) + 1)]
    if not rows:
        raise DataError(f"{name}: no rows; give a file or split with at least one")
    if prompts and not any(config.prompt in row for row in rows):
        raise DataError(
            f"{places[0]} has no column {config.prompt!r} (it has {', '.join(sorted(rows[0]))}), "
            "nor has another; name the prompt's column with data.prompt"
        )
    kept = slice(config.size)
    return RowSource(tuple(rows[kept]), config.prompt, tuple(places[kept]), environment=environment)


_SAVE_SO = "save it as UTF-8"
_BY_DATASETS = "or name a folder of such files by data.dataset"
_OTHERS = {
    b"\x1f\x8b": f"it is compressed by gzip: unpack it, {_BY_DATASETS}",
    b"PK": "it is a zip archive or a spreadsheet: unpack it, or save it as CSV",
    b"PAR1": f"it is Parquet: write it as JSONL, {_BY_DATASETS}",
}
"""What a file is that begins so, and what to do."""


def read_file(path: Path) -> dict[int, Row]:
    """The rows of a file by the number of the line, from 1, at which each ends.

    That of ``.csv`` is read as such, with texts alone, of any other as a JSON object per line;
    blank lines are skipped.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        cure = next((cure for start, cure in _OTHERS.items() if data.startswith(start)), _SAVE_SO)
        raise DataError(f"{path}: cannot be read as UTF-8 text ({error}); {cure}") from error
    return _csv_rows(path, text) if path.suffix.lower() == ".csv" else _json_rows(path, text)


def _csv_rows(path: Path, text: str) -> dict[int, Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: dict[int, Row] = {}
    try:
        names = next(reader, [])
        if len(names) == 1 and (found := {*";\t"} & {*names[0]}):
            raise csv.Error(f"{names[0]!r} is one column; separate by commas, not {found.pop()!r}")
        for cells in filter(None, reader):
            if len(cells) != len(names):
                raise csv.Error(f"{len(cells)} cells under {len(names)} columns")
            rows[reader.line_num] = dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num}: not CSV: {error}") from error
    return rows


def _json_rows(path: Path, text: str) -> dict[int, Row]:
    rows: dict[int, Row] = {}
    # By line feeds alone: JSON's texts may hold all the other characters that Python splits at.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows[number] = _row(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}") from error
    return rows


def _row(line: str) -> Row:
    try:
        row = json.loads(line)
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:  # also of a number with more digits than Python converts
        why = str(error).partition(";")[0].replace("line 1 column", "column")
        raise ValueError(f"not JSON ({why}); {_form(line)}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{type(row).__name__} where an object must be; {_form(line)}")
    may_be_deep = line.count("[") + line.count("{") > MOST_NESTED
    if may_be_deep and any(depth > MOST_NESTED for _, _, depth in entries(row)):
        raise ValueError(TOO_DEEP)
    try:
        if "\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(error.object[error.start]):x}"
        raise ValueError(f"{half} alone is half a character (a lone surrogate)") from error
    return row


def _form(line: str) -> str:
    if line.lstrip().startswith("["):
        return "write each object of the list on a line of its own, without commas between them"
    return "write one object a line, {...}, or a .csv file whose first line names the columns"


def split_rows(
    rows: Sequence[Row],
    text_of: Callable[[Row], str],
    *,
    held_out: Sequence[Row] = (),
    num_held_out: int,
    num_shots: int,
    seed: int,
) -> Split:
    """Shots and held-out questions are distinct; whatever has their text is no training question.

    Args:
        held_out: questions of a source of their own.
        num_held_out: further ones of ``rows``.

    NOTE [Held out by text]
    Generated tasks repeat themselves: of 1000 one-digit sums only some 200 are different. Splitting
    by index would put most held-out questions into the training set as well.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    elsewhere = {text_of(row) for row in held_out}
    first_of: dict[str, int] = {}
    for index in order:
        first_of.setdefault(text_of(rows[index]), index)
    distinct = [(text, index) for text, index in first_of.items() if text not in elsewhere]
    taken = distinct[: num_shots + num_held_out]
    used = elsewhere | {text for text, _ in taken}
    train = tuple(row for row in rows if text_of(row) not in used)
    if len(taken) < num_shots + num_held_out or not train:
        raise DataError(
            f"{len(distinct)} distinct questions{' besides those of [eval]' if held_out else ''} "
            f"are too few for {f'{num_shots} examples, ' if num_shots else ''}"
            f"{num_held_out} held out and at least one to train on; raise data.size or lower "
            "eval.size"
        )
    picked = [rows[index] for _, index in taken]
    return Split(train, (*held_out, *picked[num_shots:]), tuple(picked[:num_shots]))


def majority_baseline(rows: Iterable[Mapping[str, Any]], answer: str) -> float | None:
    """Accuracy of always giving the most frequent answer; ``None`` without an answer column."""
    counts = Counter(str(row[answer]) for row in rows if answer in row)
    return max(counts.values()) / counts.total() if counts else None


class PromptStream:
    """Endless stream of training rows, reshuffled each epoch; its state is one number."""

    def __init__(self, num_rows: int, seed: int, *, shuffle: bool = True) -> None:
        self.num_rows, self.seed, self.shuffle = num_rows, seed, shuffle
        self.position = 0

    def take(self, count: int) -> list[int]:
        """The next ``count`` row numbers; a batch may straddle two epochs."""
        picked: list[int] = []
        while len(picked) < count:
            epoch, start = divmod(self.position, self.num_rows)
            part = self._order(epoch)[start : start + count - len(picked)]
            picked += part
            self.position += len(part)
        return picked

    @property
    def epoch(self) -> float:
        return self.position / self.num_rows

    def _order(self, epoch: int) -> list[int]:
        order = list(range(self.num_rows))
        if self.shuffle:
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return order


def _reasoning_gym(config: DataConfig, name: str) -> RowSource:
    with warnings.catch_warnings():
        # Of a package of its own: Python says them where it compiles that, at the first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        gym = optional("reasoning_gym", f"data.reasoning_gym={name!r}")
    known = tuple(gym.factory.DATASETS)
    if name not in known:
        near = did_you_mean(name, known)
        raise DataError(f"data.reasoning_gym={name!r} is no task of reasoning-gym{near}")
    size = config.size or DEFAULT_GYM_SIZE
    try:
        task = gym.create_dataset(name, size=size, seed=config.seed, **config.params)
        rows = tuple(dict(task[index]) for index in range(size))
    # Its tasks check little, and fail in their own ways where a parameter does not fit.
    except Exception as error:
        raise DataError(f"data.params: {name} refuses them: {error!r}") from error
    places = tuple(f"{name}: question {number}" for number in range(1, size + 1))
    return RowSource(
        rows, "question", places, lambda answer, row: float(task.score_answer(answer, row))
    )


def _hub_dataset(config: DataConfig, name: str) -> list[Row]:
    datasets = optional("datasets", f"data.dataset={name!r}")
    try:
        table = datasets.load_dataset(name, config.subset, split=config.split)
    # The library raises whatever its many readers raise; all of it means the same to the user.
    except Exception as error:
        raise DataError(
            f"data.dataset={name!r} (subset={config.subset!r}, split={config.split!r}) cannot be "
            f"loaded: {error}"
        ) from error
    return [dict(row) for row in table]


Message = dict[str, Any]
"""Of a conversation: ``role``, ``content``, and what else its role has, such as ``tool_calls``."""
Schema = dict[str, Any]
"""Of a tool, as chat templates take it."""
Prompt = str | list[Message]


def question_text(config: DataConfig, column: str, row: Row) -> str:
    """The question of a row as text, after ``pattern`` and ``template``."""
    if column not in row:
        raise DataError(f"it has no column {column!r}")
    prompt = row[column]
    if not isinstance(prompt, str | list):
        raise DataError(f"column {column!r} is {prompt!r}; a prompt is a text or chat messages")
    messages = messages_in(prompt, column) if isinstance(prompt, list) else [{"content": prompt}]
    text = "\n".join(message["content"] for message in messages)
    if not text.strip():
        raise DataError(f"column {column!r} is empty")
    if config.template is None:
        return text
    names = {key: value for key, value in row.items() if isinstance(key, str)}
    if config.pattern is not None:
        match = re.search(config.pattern, text)
        if match is None:
            raise DataError(f"data.pattern={config.pattern!r} does not match the prompt {text!r}")
        names |= {key: (value or "").strip() for key, value in match.groupdict().items()}
    try:
        return config.template.format_map(names)
    # A wrong name, index or attribute, or a format that a column's value does not take.
    except Exception as error:
        raise DataError(
            f"data.template={config.template!r}: {error!r}; it may name {', '.join(sorted(names))}"
        ) from error


def messages_in(given: Sequence[Any], column: str) -> list[Message]:
    if not given:
        raise DataError(f"column {column!r} is empty; a conversation has a message at least")
    for message in given:
        if not isinstance(message, dict) or {"role", "content"} - message.keys():
            raise DataError(f"column {column!r}: {shown(message)} is no {{role, content}} message")
        for name in ("role", "content"):
            if not isinstance(message[name], str):
                raise DataError(
                    f"column {column!r}: {name} is {shown(message[name])} in a message; give a text"
                )
    return list(given)


class ChatTemplate:
    """A tokenizer's way from messages to text, and from there to tokens."""

    def __init__(self, tokenizer: Any, keywords: Mapping[str, Any]) -> None:
        self.tokenizer, self.keywords = tokenizer, keywords

    def render(
        self, messages: Sequence[Message], tools: Sequence[Schema] = (), *, ask: bool = False
    ) -> str:
        """The conversation as text; ``ask`` puts the header of the assistant's next turn behind."""
        # No list is not an empty one: some templates write a heading for that.
        text: str = self.tokenizer.apply_chat_template(
            list(messages),
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=ask,
            **self.keywords,
        )
        return text

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class PromptBuilder:
    """Makes prompts and their token ids; ``shots`` are solved rows that precede each prompt. Raises
    ``DataError`` if ``chat`` is on and the tokenizer has no chat template, or one that does not
    read ``chat_template_kwargs``."""

    def __init__(
        self, config: DataConfig, column: str, shots: Sequence[Row], tokenizer: Any
    ) -> None:
        template = getattr(tokenizer, "chat_template", None)  # a text, or one for each purpose
        if config.chat and not template:
            raise DataError(
                "data.chat=true but the model's tokenizer has no chat template; set data.chat=false"
            )
        for name in config.chat_template_kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", str(template)):
                raise DataError(
                    f"data.chat_template_kwargs: the model's chat template reads no {name!r}; look "
                    "at its chat_template for the names"
                )
        self.config, self.column, self.tokenizer = config, column, tokenizer
        self.template = ChatTemplate(tokenizer, config.chat_template_kwargs)
        self.head: list[Message] = []
        if config.system is not None:
            self.head.append({"role": "system", "content": config.system})
        for row in shots:
            if config.answer not in row:
                raise DataError(
                    f"data.few_shot needs the column {config.answer!r}; name it by data.answer"
                )
            self.head += [
                {"role": "user", "content": question_text(config, column, row)},
                {"role": "assistant", "content": str(row[config.answer])},
            ]
        self.head += [{"role": turn.role, "content": turn.content} for turn in config.turns]

    def prompt(self, row: Row) -> Prompt:
        """Chat messages, or a text where ``data.chat`` is off."""
        given = row[self.column]
        if self.config.chat and isinstance(given, list) and self.config.template is None:
            messages_in(given, self.column)
            if (last := given[-1]["role"]) not in ("user", "tool"):
                raise DataError(
                    f"column {self.column!r} ends with the {last}'s message; leave out what comes "
                    "after the user's last one, which the model is to answer"
                )
            return [*self.head, *given]
        text = question_text(self.config, self.column, row)
        return [*self.head, {"role": "user", "content": text}] if self.config.chat else text

    def encode(self, prompt: Prompt, tools: Sequence[Schema] = ()) -> list[int]:
        """Token ids, without padding."""
        try:
            if isinstance(prompt, str):
                ids = list(self.tokenizer(prompt)["input_ids"])
            else:
                ids = self.template.encode(self.template.render(prompt, tools, ask=True))
        except Exception as error:  # the template is a program, of the model's author
            raise DataError(
                f"the model's tokenizer or its chat template fails with {error!r} at the prompt "
                f"{str(prompt)[:120]!r}; look at both, or set data.chat=false"
            ) from error
        if not 0 < len(ids) <= self.config.max_prompt_tokens:
            raise DataError(
                f"the prompt has {len(ids)} tokens, outside 1..{self.config.max_prompt_tokens} "
                f"(data.max_prompt_tokens): {str(prompt)[:120]!r}"
            )
        return ids
