"""A chat template read both ways: tokens of the model become a message, answers to it tokens.

NOTE [Tokens in are tokens out]
Nothing that the policy has drawn is ever made into text and back. A turn's prompt is the last
turn's prompt, the tokens drawn on it, and behind their stop token what the chat template writes
after an assistant's turn: the tool messages and the next turn's header. Only these are rendered,
behind a stand-in for the assistant's turn. So it does not matter that many templates render the
same conversation differently as it grows (Qwen3 leaves earlier thoughts out): the policy goes on
from its own tokens, and is trained on exactly them. Where a template ends a turn by another token
than the policy did, the policy's own stays.

NOTE [Which syntax]
What a call of a tool looks like says the tokenizer's ``response_template`` (transformers parses
it), or ``rollout.response_template``. Without one it is read off the chat template: a call with
known names is rendered, and if there is a JSON value of them, what stands around it is the
syntax: ``<tool_call>{...}</tool_call>`` (Qwen2.5, Qwen3, SmolLM3, Hermes), ``[TOOL_CALLS][{...}]``
(Mistral), a bare ``{...}`` (Llama 3.1). So it is with tags around names and arguments (Qwen3.5,
Qwen3-Coder, Nemotron 3, GLM 4). Others (Gemma 4, LFM2, gpt-oss, DeepSeek V3) need a response
template; many of their repositories have one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.version import Version

from fxrl.errors import ConfigError, optional, shown
from fxrl.rl.data.questions import ChatTemplate, Message, Schema

LEAST_TRANSFORMERS = "5.15"
"""The first whose ``parse_response`` knows the tools' types."""
PREFIX_TOKENS = 256
"""Of a turn's prompt that the parser sees: the assistant's header is among them."""


class ChatTemplateError(ConfigError):
    """A chat template cannot do what conversations of several turns need of it."""


class Chat(ChatTemplate):
    """Conversations of one tokenizer; without ``calls``, of tools, ``parse`` is not for use.

    ``response_template`` is of transformers; by default the tokenizer's, else what the chat
    template implies (NOTE [Which syntax]), with a ``ChatTemplateError`` where that is none. Raises
    ``ConfigError`` if transformers is too old.
    """

    def __init__(
        self,
        tokenizer: Any,
        keywords: Mapping[str, Any],
        response_template: Mapping[str, Any] | None = None,
        *,
        calls: bool = True,
    ) -> None:
        super().__init__(tokenizer, keywords)
        if not calls:
            return
        version = optional("transformers", "tools").__version__
        if Version(version) < Version(LEAST_TRANSFORMERS):
            raise ConfigError(f"tools need transformers >= {LEAST_TRANSFORMERS}, not {version}")
        given = response_template or getattr(tokenizer, "response_template", None)
        self._is_derived = given is None
        self._syntax = dict(given) if given else self._implied()

    def parse(
        self, ids: Sequence[int], prompt: Sequence[int], schemas: Sequence[Schema], *, ended: bool
    ) -> Message:
        """The assistant's message of what the policy drew on ``prompt``; ``ended``: the last of
        ``ids`` is a stop token. It has ``role``, ``content``, and ``tool_calls`` where there are
        any, each with ``id`` and ``function``: ``name`` and ``arguments``. What is no call that can
        be read is content."""
        stop = self.tokenizer.decode(list(ids[-1:])) if ended else ""
        # Of an implied syntax nothing refers to the stop token; a given one may need it.
        given = ids[:-1] if ended and self._is_derived else ids
        prefix = self.tokenizer.decode(list(prompt[-PREFIX_TOKENS:]))
        words = self.tokenizer.decode(list(given))
        try:
            found = self.tokenizer.parse_response(
                words, self._syntax, prefix=prefix, tools=list(schemas)
            )
            calls = list(_calls(found.pop("tool_calls", None)))
            if self._is_derived:
                self._check_closed(words, len(calls))
        except (ValueError, TypeError, KeyError):  # the parser's, of what the model wrote
            text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
            return {"role": "assistant", "content": text}
        content = str(found.get("content") or "").removesuffix(stop)
        message = {**found, "role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [_call(number, *call) for number, call in enumerate(calls)]
        return message

    def _check_closed(self, words: str, num_calls: int) -> None:
        """Half of a JSON text is none; tags that break off leave arguments out."""
        field = self._syntax["fields"]["tool_calls"]
        tagged = field["content"] == "xml-inline"
        if tagged and len(re.findall(field["close_pattern"], words)) < num_calls:
            raise ValueError("a call breaks off")

    def answered(
        self, said: Message, answers: Sequence[Message], stop: int, schemas: Sequence[Schema]
    ) -> list[int]:
        """Token ids between the end of an assistant's turn, the token ``stop``, and the beginning
        of its next one."""
        # NOTE [Tokens in are tokens out]; without arguments, which may spell anything.
        stand_in: Message = {"role": "assistant", "content": ""}
        if calls := said.get("tool_calls"):
            stand_in["tool_calls"] = [with_arguments(call, {}) for call in calls]
        before = self.render(_QUESTION, schemas)
        whole = self.render([*_QUESTION, stand_in, *answers], schemas, ask=True)
        if not whole.startswith(before):
            raise ChatTemplateError(
                "the model's chat template renders a question differently once it is answered, so "
                f"there is no telling what follows an answer: {shown(before)} became "
                f"{shown(whole)}; give a template that only appends (tokenizer.chat_template)"
            )
        own = self.tokenizer.decode([stop])
        rest = whole[len(before) :]
        ends = [
            rest.index(text) + len(text) for text in (own, self.tokenizer.eos_token) if text in rest
        ]
        if not ends:
            raise ChatTemplateError(
                f"the model's chat template ends an assistant's turn neither by {own!r} nor by "
                f"{self.tokenizer.eos_token!r}: {shown(rest)}; give one that does "
                "(tokenizer.chat_template), or the token it ends by as sampling.stop_token_ids"
            )
        # With the token before it, so that nothing is put in front as at the start of a text.
        ids = self.encode(own + rest[min(ends) :])
        if ids[:1] != [stop]:
            raise ChatTemplateError(
                f"the tokenizer makes {ids[:1]} of {own!r}, the text of its token {stop}; turns "
                "must end by a special token"
            )
        return ids[1:]

    def _implied(self) -> dict[str, Any]:
        said = {"role": "assistant", "content": "", "tool_calls": [_call(0, _NAME, _ARGUMENTS)]}
        try:
            before = self.render(_QUESTION, [_SCHEMA])
            header = self.render(_QUESTION, [_SCHEMA], ask=True)[len(before) :]
            body = self.render([*_QUESTION, said], [_SCHEMA])[len(before) :]
        except Exception as error:  # the template is a program, of the model's author
            raise ChatTemplateError(
                f"the model's chat template fails with {error!r} at a tool call; {_OTHER_MODEL}"
            ) from error
        if _NAME not in body:
            raise ChatTemplateError(
                f"the model's chat template leaves tool calls out; {_OTHER_MODEL}"
            )
        same = [a == b for a, b in zip(header, body, strict=False)]
        header = header[: [*same, False].index(False)].partition("<think>")[0]
        words = body[len(header) :].partition(self.tokenizer.eos_token)[0]
        if (field := _json_field(words) or _tagged_field(words)) is None:
            raise ChatTemplateError(
                f"the model's chat template writes tool calls as {shown(words)}, which is neither "
                "JSON with a name and arguments nor tags around them; say how they are read: "
                "rollout.response_template, or tokenizer.response_template (transformers' "
                "documentation of response parsing)"
            )
        fields: dict[str, Any] = {"tool_calls": field, "content": {"content": "text"}}
        if "<think>" in str(self.tokenizer.chat_template):
            thought = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
            fields = {"reasoning_content": thought} | fields
        # Where no header goes before an assistant's words, they begin where the prompt ends.
        anchor = {"start_anchor": header} if header.strip() else {"start_anchor_pattern": r"\Z"}
        return {"defaults": {"role": "assistant"}, "fields": fields, **anchor}


_NAME = "fxrl_tool"
_ARGUMENTS = {"fxrl_key1": "fxrl_value1", "fxrl_key2": "fxrl_value2"}
_SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {key: {"type": "string", "description": ""} for key in _ARGUMENTS},
            "required": [*_ARGUMENTS],
        },
    },
}
_QUESTION: list[Message] = [{"role": "user", "content": "?"}]
_OTHER_MODEL = (
    "take a model that is made for tools, or give its tokenizer a template that writes them "
    "(tokenizer.chat_template)"
)


def _json_field(words: str) -> dict[str, Any] | None:
    """The part of a response schema that reads JSON calls; None if the template's call is none."""
    for start in (at for at, letter in enumerate(words[: words.index(_NAME)]) if letter in "[{"):
        try:
            value, end = json.JSONDecoder().raw_decode(words, start)
            found = list(_calls(value))
        except ValueError:
            continue
        if found == [(_NAME, _ARGUMENTS)]:
            break
    else:
        return None
    opening = re.search(r"(<[^<>\s]+>|\[\w+\]|\S*)\s*$", words[:start])
    first = re.match(r'\W*"(\w+)"', words[start:end])
    assert opening is not None
    assert first is not None
    begins = {"open": opening[1]} if opening[1] else {}
    begins = begins or {"open_pattern": rf'(?=[\[{{]\W*"{first[1]}"\s*:)'}
    closing = words[end:].strip()
    ends = {"close_pattern": rf"{re.escape(closing)}\s*"} if closing else {}
    transform = {"type": "function", "function": "{content}"}
    return {"repeats": True, "content": "json", "transform": transform, **begins, **ends}


def _tagged_field(words: str) -> dict[str, Any] | None:
    """The part of a response schema that reads calls whose name and arguments stand between tags;
    None if the template's call is none."""
    (key, value), (key2, value2) = _ARGUMENTS.items()
    parts = re.fullmatch(f"(.*){_NAME}(.*){key}(.*){value}(.*){key2}(.*){value2}(.*)", words, re.S)
    closing = re.search(r"</\w+>\s*$", words)
    if parts is None or closing is None or parts[3] != parts[5]:
        return None
    before, after_name, middle, between, _, _ = parts.groups()
    opening = before.rfind(closing[0].strip().replace("/", ""))
    # What goes before each key is what goes before the first and before the second.
    tag = re.search(r"<[^<]*$", between)
    if opening < 0 or tag is None or not after_name.endswith(tag[0]):
        return None
    argument = rf"{_loose(tag[0])}(?P<key>[^<>\n]+?){_loose(middle)}(?P<value>.*?)"
    return {
        "repeats": True,
        "open_pattern": rf"{_loose(before[opening:])}(?P<name>[^\s<>]+)",
        "close_pattern": rf"{re.escape(closing[0].strip())}\s*",
        "content": "xml-inline",
        "content_args": {"tag_pattern": argument + _loose(between.removesuffix(tag[0]))},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }


def _loose(text: str) -> str:
    """A pattern of ``text`` with any white space where it has some."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))


def _calls(given: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and arguments of each call, whichever way the model's family nests and names them."""
    if isinstance(given, list):
        for one in given:
            yield from _calls(one)
    elif isinstance(given, dict) and "function" in given:
        yield from _calls(given["function"])
    elif isinstance(given, dict):
        name = next((given[key] for key in ("name", "tool_name") if key in given), None)
        of = (given[key] for key in ("arguments", "parameters", "args") if key in given)
        arguments = next(of, None)
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            raise ValueError(f"{given!r} is no call")
        yield name, arguments or {}
    elif given is not None:
        raise ValueError(f"{given!r} is no call")


def _call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A message's call. Mistral's templates want ids of nine letters and digits."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"call{number:05d}", "type": "function", "function": function}


def with_arguments(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A message's call with other arguments."""
    return {**call, "function": {**call["function"], "arguments": arguments}}
