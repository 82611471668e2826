"""From a dataset's row to the prompt's tokens: template, chat turns, chat template, tokenizer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from fxrl.rl.config.tables import DataConfig
from fxrl.rl.errors import DataError
from fxrl.rl.types import Row

Message = dict[str, str]
Prompt = str | list[Message]


def question_text(config: DataConfig, column: str, row: Row) -> str:
    """The question of a row as text, after ``pattern`` and ``template``.

    Raises:
        DataError: the pattern does not match, or the template names what is not there.
    """
    prompt = row[column]
    if not isinstance(prompt, str | list):
        raise DataError(f"column {column!r} is {prompt!r}; a prompt is a text or chat messages")
    text = prompt if isinstance(prompt, str) else _flatten(prompt, column)
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
    except (KeyError, IndexError, ValueError) as error:
        raise DataError(
            f"data.template={config.template!r}: {error!r}; it may name {', '.join(sorted(names))}"
        ) from error


def _flatten(messages: Sequence[Any], column: str) -> str:
    for message in messages:
        if not isinstance(message, dict) or {"role", "content"} - message.keys():
            raise DataError(f"column {column!r}: {message!r} is no {{role, content}} message")
    return "\n".join(str(message["content"]) for message in messages)


class PromptBuilder:
    """Makes prompts and their token ids; ``shots`` are solved rows that go before each prompt.

    Raises:
        DataError: ``chat`` is on and the tokenizer has no chat template.
    """

    def __init__(
        self, config: DataConfig, column: str, shots: Sequence[Row], tokenizer: Any
    ) -> None:
        if config.chat and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "data.chat=true but the model's tokenizer has no chat template; set data.chat=false"
            )
        self.config, self.column, self.tokenizer = config, column, tokenizer
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
            _flatten(given, self.column)
            return [*self.head, *given]
        text = question_text(self.config, self.column, row)
        return [*self.head, {"role": "user", "content": text}] if self.config.chat else text

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids, without padding.

        Raises:
            DataError: none, or more than ``data.max_prompt_tokens``.
        """
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt)["input_ids"])
        else:
            text = self.tokenizer.apply_chat_template(
                prompt, tokenize=False, add_generation_prompt=True
            )
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not 0 < len(ids) <= self.config.max_prompt_tokens:
            raise DataError(
                f"a prompt has {len(ids)} tokens, outside 1..{self.config.max_prompt_tokens} "
                f"(data.max_prompt_tokens): {str(prompt)[:120]!r}"
            )
        return ids
