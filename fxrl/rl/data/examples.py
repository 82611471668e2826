"""Data that is trained on as it is: sequences, pairs and labelled sequences, as rows of tokens.

| form | columns, the first that a row has |
| --- | --- |
| ``sequences`` | ``messages``; ``prompt``, ``completion``; ``text`` |
| ``pairs`` | ``prompt``, ``chosen``, ``rejected``; ``chosen``, ``rejected`` |
| ``labelled`` | ``prompt``, ``completion``, ``label`` |

``messages`` are a conversation. A prompt, and what answers it, are both texts or both messages;
two whole conversations ``chosen`` and ``rejected`` have what they begin with as their prompt.
These are the forms of TRL's datasets. Texts become chat turns where ``data.chat`` is on, as the
prompts of rollouts do; ``text`` is taken as it stands.

NOTE [Which tokens are learned]
Those that the model itself would say: of a conversation the assistant's messages, each up to its
end-of-turn token (what a template writes behind that is never sampled); of two texts the
completion and the end token. A template with ``{% generation %}`` says itself which they are. Of
any other the conversation is rendered up to each of these messages, once with what asks for an
answer and once with the message: what the second has more is the message. The pieces become tokens
one by one, so the tokens before an answer are those that the model is asked with in a rollout. A
template that writes earlier turns otherwise once others follow (such as leaving out their
reasoning) has no such pieces, and is refused.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from fxrl.errors import shown
from fxrl.rl.config.tables import DataConfig
from fxrl.rl.data.questions import Message, PromptBuilder, Split, messages_in
from fxrl.rl.errors import DataError
from fxrl.rl.report.timing import Clock
from fxrl.rl.types import Experience, Metrics, Row, TokenRow, TrainerState

Unit = tuple[TokenRow, ...]
"""What a row of the data is trained on as: one sequence, or the chosen and the rejected one."""
Part = str | list[Message]
"""A prompt or what answers it: a text or messages."""


class ExampleBuilder:
    """Makes units of the data's rows; ``form`` is a key of ``FORMS``."""

    def __init__(self, config: DataConfig, form: str, prompt: str, tokenizer: Any) -> None:
        self.config, self.form, self.tokenizer = config, form, tokenizer
        self._prompt = prompt
        self._names = {"prompt": prompt, **config.columns}

    @cached_property
    def _chat(self) -> PromptBuilder:
        """Raises DataError where the tokenizer has no chat template."""
        return PromptBuilder(self.config, self._prompt, (), self.tokenizer)

    @cached_property
    def _says_itself(self) -> bool:
        template = str(getattr(self.tokenizer, "chat_template", None))
        return re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def columns(self, row: Row) -> dict[str, Any]:
        """The columns that the form reads, by their standard names."""
        sets = FORMS[self.form].columns
        for names in sets:
            if all(row.get(self._names.get(name, name)) is not None for name in names):
                return {name: row[self._names.get(name, name)] for name in names}
        wanted = ", or ".join(" and ".join(names) for names in sets)
        raise DataError(
            f"it has the columns {', '.join(map(str, row))}; loss and data.form read {wanted} "
            "(data.columns names others)"
        )

    def text_of(self, row: Row) -> str:
        """What makes two rows the same question: the prompt where there is one."""
        found = self.columns(row)
        return json.dumps(found.get("prompt", found), sort_keys=True, default=str)

    def unit(self, row: Row) -> Unit:
        return FORMS[self.form].unit(self, self.columns(row))

    def answered(self, prompt: Any, answer: Any, column: str) -> TokenRow:
        """A prompt and what answers it, which is learned."""
        question, told = part(prompt, "prompt"), part(answer, column)
        if type(question) is not type(told):
            raise DataError(
                f"its prompt is {_kind(question)} and its {column} {_kind(told)}; give both as the "
                "same"
            )
        if isinstance(question, str) and isinstance(told, str) and not self.config.chat:
            ids = list(self.tokenizer(question)["input_ids"])
            return self._row(ids, *self._ended(told, special=False))
        asked = _as_messages(question, "user")
        return self.conversation([*asked, *_as_messages(told, "assistant")], len(asked))

    def text(self, text: Any) -> TokenRow:
        """A text as it stands, with the end token."""
        if not isinstance(text, str) or not text:
            raise DataError(f"column 'text' is {shown(text)}; give a text")
        return self._row([], *self._ended(text, special=True))

    def conversation(self, messages: Any, first: int = 0) -> TokenRow:
        """Messages, of which the assistant's are learned from number ``first`` on."""
        given = part(messages, "messages")
        if isinstance(given, str) or not self.config.chat:
            raise DataError(
                f"it holds {_kind(given)} where data.chat={self.config.chat}; messages need the "
                "chat template, data.chat=true"
            )
        head = self._chat.head
        try:
            if self._says_itself:
                ids, mask = self._by_template([*head, *given], len(head) + first)
            else:
                ids, mask = self._by_pieces([*head, *given], len(head) + first)
        except DataError:
            raise
        except Exception as error:  # the template is a program, of the model's author
            raise DataError(
                f"the model's tokenizer or its chat template fails with {error!r} at "
                f"{shown(given)}; look at both"
            ) from error
        return self._row([], ids, mask)

    def _by_template(self, messages: Sequence[Message], first: int) -> tuple[list[int], list[int]]:
        found = self.tokenizer.apply_chat_template(
            list(messages),
            return_dict=True,
            return_assistant_tokens_mask=True,
            **self.config.chat_template_kwargs,
        )
        ids, mask = list(found["input_ids"]), list(found["assistant_masks"])
        chat = self._chat.template
        asked = len(chat.encode(chat.render(messages[:first], ask=True))) if first else 0
        return ids, [0] * min(asked, len(ids)) + mask[asked:]

    def _by_pieces(self, messages: Sequence[Message], first: int) -> tuple[list[int], list[int]]:
        chat = self._chat.template
        ids: list[int] = []
        mask: list[int] = []
        done = ""
        for place, message in enumerate(messages):
            if place < first or message["role"] != "assistant":
                continue
            asked = chat.render(messages[:place], ask=True)
            told = chat.render(messages[: place + 1])
            if not (asked.startswith(done) and told.startswith(asked)):
                raise DataError(
                    f"the model's chat template writes what stands before message {place + 1} "
                    "otherwise once that follows, so that its tokens are not those the model is "
                    "asked with; give conversations with one answer each, or the model a template "
                    "with {% generation %}"
                )
            before, own = chat.encode(asked[len(done) :]), chat.encode(told[len(asked) :])
            end = self.tokenizer.eos_token_id
            counted = len(own) - own[::-1].index(end) if end in own else len(own)
            ids += before + own
            mask += [0] * len(before) + [1] * counted + [0] * (len(own) - counted)
            done = told
        return ids, mask

    def _ended(self, text: str, *, special: bool) -> tuple[list[int], list[int]]:
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        if (end := self.tokenizer.eos_token_id) is not None and ids[-1:] != [end]:
            ids.append(end)
        return ids, [1] * len(ids)

    def _row(self, before: Sequence[int], own: Sequence[int], mask: Sequence[int]) -> TokenRow:
        """``before`` and ``own``, of which what ``mask`` says is learned, up to the last of it."""
        ids, counted = [*before, *own], [*([0] * len(before)), *mask]
        if self.config.train_on == "all":
            counted = [1] * len(ids)
        end = len(counted) - counted[::-1].index(1) if 1 in counted else 0
        first = max(1, counted.index(1)) if end else 0  # no token is before the first to predict it
        if first >= end:
            raise DataError("it holds nothing to learn: no token of an answer")
        if end > self.config.max_length:
            raise DataError(f"it has {end} tokens, above data.max_length={self.config.max_length}")
        row = array("i", ids[:first]), array("i", ids[first:end])
        return TokenRow(*row, {"completion_mask": array("b", counted[first:end])}, {})


def part(given: Any, column: str) -> Part:
    """A text or a list of messages, each with a role and a text."""
    if isinstance(given, dict):
        given = [given]
    if isinstance(given, str) and given:
        return given
    if not isinstance(given, list | tuple):
        raise DataError(f"column {column!r} is {shown(given)}; give a text or chat messages")
    return messages_in(given, column)


def _kind(given: Part) -> str:
    return "a text" if isinstance(given, str) else "a list of messages"


def _as_messages(given: Part, role: str) -> list[Message]:
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _sequence(make: ExampleBuilder, found: Mapping[str, Any]) -> Unit:
    if "messages" in found:
        return (make.conversation(found["messages"]),)
    if "text" in found:
        return (make.text(found["text"]),)
    return (make.answered(found["prompt"], found["completion"], "completion"),)


def _pair(make: ExampleBuilder, found: Mapping[str, Any]) -> Unit:
    chosen, rejected = part(found["chosen"], "chosen"), part(found["rejected"], "rejected")
    if "prompt" not in found:
        if isinstance(chosen, str) or isinstance(rejected, str):
            raise DataError("it has no prompt; only two conversations, as messages, go without")
        same = [a == b for a, b in zip(chosen, rejected, strict=False)]
        common = same.index(False) if False in same else len(same)
        if not common:
            raise DataError("chosen and rejected begin with different messages; give their prompt")
        found = {"prompt": chosen[:common]}
        chosen, rejected = chosen[common:], rejected[common:]
    if chosen == rejected:
        raise DataError("chosen and rejected are the same")
    pairs = (("chosen", chosen), ("rejected", rejected))
    return tuple(make.answered(found["prompt"], told, column) for column, told in pairs)


def _labelled(make: ExampleBuilder, found: Mapping[str, Any]) -> Unit:
    label = found["label"]
    if label not in (True, False):
        raise DataError(f"column 'label' is {shown(label)}; give true (desirable) or false")
    row = make.answered(found["prompt"], found["completion"], "completion")
    return (row._replace(per_row={"desirable": float(label)}),)


@dataclass(frozen=True, slots=True)
class Form:
    """What rows of data may look like."""

    columns: tuple[tuple[str, ...], ...]  # sets of them; a row is of the first that it has
    unit: Callable[[ExampleBuilder, Mapping[str, Any]], Unit]
    size: int = 1  # rows of a unit


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "sequences": Form((("messages",), ("prompt", "completion"), ("text",)), _sequence),
        "pairs": Form((("prompt", "chosen", "rejected"), ("chosen", "rejected")), _pair, 2),
        "labelled": Form((("prompt", "completion", "label"),), _labelled),
    }
)


@dataclass(frozen=True, slots=True)
class Examples:
    """Training data as they are, and what steps on them take the place of a ``Rollouter`` by."""

    split: Split  # units of tokens
    tokenizer: Any
    per_step: int  # units of a step
    rows_each: int  # rows of a unit
    fingerprints: Mapping[str, str]  # of data and loss, by name
    headline: tuple[str, str] = ("loss", "loss")
    draws: bool = False

    def source(self, *_: Any) -> Examples:
        """Itself: no engine takes part."""
        return self

    def experience(
        self,
        take: Callable[[int], Sequence[Unit]],
        state: Callable[[], TrainerState],
        clock: Clock,
    ) -> Experience:
        return self._chosen(take(self.per_step))

    def evaluate(
        self, data: Sequence[Unit], state: TrainerState, measure: Callable[[Experience], Metrics]
    ) -> Metrics:
        """The loss and its metrics of held-out units, by ``measure``, which does not train."""
        return {f"eval/{name}": value for name, value in measure(self._chosen(data)).items()}

    def _chosen(self, units: Sequence[Unit]) -> Experience:
        rows = [row for unit in units for row in unit]
        lengths = [len(row.completion) for row in rows]  # told as those of completions are
        told = {"mean": sum(lengths) / len(lengths), "min": min(lengths), "max": max(lengths)}
        labels = [row.per_row["desirable"] for row in rows if "desirable" in row.per_row]
        return Experience(
            rows,
            {f"completions/{name}_length": float(value) for name, value in told.items()},
            num_tokens=sum(sum(row.lengths) for row in rows),
            num_completion_tokens=sum(row.num_counted for row in rows),
            unit=self.rows_each,
            counts={"num_desirable_in_batch": sum(labels)} if labels else {},
        )

    @property
    def longest(self) -> int:
        return max(sum(row.lengths) for row in self.largest())

    def largest(self) -> Unit:
        """The unit of the most tokens in one row."""
        units = (*self.split.train, *self.split.held_out)
        return max(units, key=lambda unit: max(sum(row.lengths) for row in unit))

    def warnings(self, record: Mapping[str, Any]) -> Iterator[str]:
        return iter(())

    def failures(self) -> list[str]:
        return []
