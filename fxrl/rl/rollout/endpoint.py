"""A chat endpoint on this machine that programs talk to, answered by the run's engine.

It speaks OpenAI's chat completions, a path for each rollout. A request waits in a thread of its own
until the main thread, which alone draws and tokenizes, has an answer.

NOTE [All turns are drawn together]
``asked`` waits until every rollout that is not over has asked. So each turn is one call of the
engine, and what a rollout draws does not depend on how fast its program or another's is.

NOTE [What a program may send]
The conversation so far and what is new in it: its tokens then are those of the last turn, and what
the chat template writes for the new messages (``fxrl/rl/rollout/chat.py``, NOTE [Tokens in are
tokens out]). Whoever rewrites, shortens or begins another conversation within a rollout would be
trained on what the policy never read; that is an error, and so are settings of the sampling other
than the run's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from fxrl.engines import Completion, SamplingParams
from fxrl.errors import shown
from fxrl.rl.data.questions import Message, PromptBuilder, Schema
from fxrl.rl.errors import ToolError
from fxrl.rl.rollout.chat import Chat, with_arguments
from fxrl.rl.rollout.turns import Transcript

Reply = Mapping[str, Any]
"""An assistant's message (``message``), why it ended (``finish_reason``), ``usage``."""

MOST_EMPTY = 100
"""Empty answers that a rollout without room gets; whoever asks further does not end by itself."""


class Exchange(NamedTuple):
    """A request and its answer, which may come later; ``None`` if there will be none."""

    rollout: int
    body: Mapping[str, Any]
    reply: Future[Reply | None]


class Endpoint:
    """Serves ``size`` rollouts while it is entered."""

    def __init__(self, size: int) -> None:
        self._live, self._asked = set(range(size)), list[Exchange]()
        self._changed, self._open = threading.Condition(), True
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, name="endpoint", daemon=True).start()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._open = False
            for one in self._asked:
                one.reply.set_result(None)
        self._server.shutdown()
        self._server.server_close()

    def url(self, rollout: int) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/{rollout}/v1"

    def over(self, rollout: int) -> None:
        """It asks no more."""
        with self._changed:
            self._live.discard(rollout)
            self._changed.notify_all()

    def asked(self, timeout_s: float | None) -> list[Exchange]:
        """The pending request of every rollout that is not over; empty when all are. Raises
        ``TimeoutError`` if no rollout asks or ends for ``timeout_s``."""
        with self._changed:
            while self._live - {one.rollout for one in self._asked}:
                if not self._changed.wait(timeout_s):
                    raise TimeoutError
            asked, self._asked = sorted(self._asked, key=lambda one: one.rollout), []
            return asked

    def ask(self, rollout: int, body: Mapping[str, Any]) -> Reply | None:
        """Waits for the answer; ``None`` if there will be none."""
        exchange = Exchange(rollout, body, Future())
        with self._changed:
            if not self._open:
                return None
            self._asked.append(exchange)
            self._changed.notify_all()
        return exchange.reply.result()


class Talk:
    """A rollout as its program sees it (NOTE [What a program may send]). ``params`` are of each
    turn, their ``max_tokens`` of all turns and answers together."""

    def __init__(
        self, builder: PromptBuilder, chat: Callable[[bool], Chat], params: SamplingParams
    ) -> None:
        self.chat, self.builder, self.params = chat, builder, params
        self.question: list[Message] = []
        self.transcript: Transcript | None = None
        self._schemas: Sequence[Schema] = ()
        self._heard: list[Any] = []
        self._reply: Reply | None = None
        self._num_empty = 0

    def listen(self, body: Mapping[str, Any]) -> Reply | None:
        """Takes what is new in a request; ``None`` wants a turn drawn."""
        _check_settings(body, self.params)
        messages, schemas = [*map(_plain, body.get("messages", ()))], body.get("tools") or ()
        if self.transcript is None:
            ids = self.builder.encode(messages, schemas)
            self.transcript = Transcript(ids, self.params.max_tokens)
            self.question, self._schemas = messages, schemas
            self._heard = [*map(_essence, messages)]
            return None
        known, essences = len(self._heard), [*map(_essence, messages)]
        if essences[:known] != self._heard or schemas != self._schemas:
            at = next(
                (i for i, (a, b) in enumerate(zip(essences, self._heard, strict=False)) if a != b),
                -1,
            )
            what = f"message {at}: {shown(messages[at])}" if at >= 0 else "its tools or its length"
            raise ToolError(
                f"the environment changed the conversation ({what} is not what was said before), "
                "or began another; fxrl trains on one conversation a rollout that only grows, so "
                "switch off what compacts, branches or edits it"
            )
        if known == len(messages):
            return self._reply  # it did not get the answer, and asks again
        self._heard = essences
        return self._continued(messages[known:])

    def _continued(self, answers: Sequence[Message]) -> Reply | None:
        assert self.transcript is not None
        if not self.transcript.over:
            said, stop = self.transcript.messages[-1], self.transcript.draws[-1].token_ids[-1]
            self.transcript.answer(
                self.chat(bool(self._schemas)).answered(said, answers, stop, self._schemas), answers
            )
        if not self.transcript.over:
            return None
        self._num_empty += 1
        if self._num_empty > MOST_EMPTY:
            raise ToolError(
                f"the environment asked {MOST_EMPTY} times more after its rollout had used all "
                f"sampling.max_tokens={self.params.max_tokens}; limit its turns"
            )
        return self._answered({"role": "assistant", "content": ""}, "length")

    def say(self, drawn: Completion) -> Reply:
        """Takes the turn that was drawn."""
        assert self.transcript is not None
        ended = drawn.finish_reason == "stop"
        ids, prompt = drawn.token_ids, drawn.prompt_token_ids
        if self._schemas:
            said = self.chat(True).parse(ids, prompt, self._schemas, ended=ended)
        else:
            text = self.builder.tokenizer.decode(list(ids), skip_special_tokens=True)
            said = {"role": "assistant", "content": text}
        self.transcript.add(drawn, said)
        self.transcript.over = not ended or self.transcript.room < 2
        reason = "tool_calls" if said.get("tool_calls") else drawn.finish_reason
        return self._answered(said, reason if ended else "length")

    def _answered(self, said: Message, reason: str) -> Reply:
        assert self.transcript is not None
        self._heard.append(_essence(said))
        total = len(self.transcript.prompt) + len(self.transcript.tokens)
        new = 0 if self._num_empty else len(self.transcript.draws[-1].token_ids)
        usage = {"prompt_tokens": total - new, "completion_tokens": new, "total_tokens": total}
        self._reply = {"message": said, "finish_reason": reason, "usage": usage}
        return self._reply

    def completion(self) -> Completion:
        """All of it, once it is over; cut off where it had no room for an answer."""
        assert self.transcript is not None
        whole = self.transcript.completion()
        return replace(whole, finish_reason="length") if self._num_empty else whole


def _check_settings(body: Mapping[str, Any], params: SamplingParams) -> None:
    given = {key: body[key] for key in _SETTINGS if body.get(key) is not None}
    for key, value in given.items():
        if value != getattr(params, key, _SETTINGS[key]):
            raise ToolError(
                f"the environment asks with {key}={shown(value)}; rollouts are drawn as [sampling] "
                "says, so leave that to it"
            )


_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "max_tokens")),
    **dict.fromkeys(("max_completion_tokens", "response_format", "logit_bias", "stop")),
    "n": 1,
    "tool_choice": "auto",
}
"""Settings of a request that change what is drawn, with the value that changes nothing."""


def _plain(message: Any) -> Message:
    """A message whose content is one text, and whose calls have their arguments as a table."""
    content = message.get("content")
    if isinstance(content, list):
        if other := [part for part in content if part.get("type") != "text"]:
            raise ToolError(f"the environment sent {shown(other[0])}; fxrl's rollouts are text")
        content = "".join(part["text"] for part in content)
    plain = {**message, "content": content or ""}
    if calls := message.get("tool_calls"):
        given = [call["function"].get("arguments") or {} for call in calls]
        tables = [json.loads(one) if isinstance(one, str) else one for one in given]
        plain["tool_calls"] = [*map(with_arguments, calls, tables)]
    return plain


def _essence(message: Message) -> Any:
    """The part of a message that is compared; programs add and drop the rest."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    read = [(one["name"], json.dumps(one["arguments"], sort_keys=True)) for one in calls]
    return message.get("role"), message.get("content") or "", read


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            _, rollout, *rest = self.path.split("/")
            if rest != ["v1", "chat", "completions"]:
                error = f"{self.path}: there are chat completions only (/v1/chat/completions)"
                return self._send(404, "application/json", _json({"error": {"message": error}}))
            asked = json.loads(body)
            if (reply := endpoint.ask(int(rollout), asked)) is None:
                error = "the run has ended this rollout"
                return self._send(503, "application/json", _json({"error": {"message": error}}))
            if asked.get("stream"):
                return self._send(200, "text/event-stream", b"".join(_events(reply, asked)))
            return self._send(200, "application/json", _json(_whole(reply, asked)))

        def _send(self, status: int, kind: str, content: bytes) -> None:
            with suppress(ConnectionError):  # whoever asked is gone
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: the standard library's writes each request to the terminal."""

    return Handler


def _wire(reply: Reply) -> dict[str, Any]:
    """The message as the protocol has it: arguments are a text."""
    said = {**reply["message"]}
    if calls := said.get("tool_calls"):
        texts = [json.dumps(call["function"]["arguments"]) for call in calls]
        written = map(with_arguments, calls, texts)
        said["tool_calls"] = [{**call, "index": at} for at, call in enumerate(written)]
    return said


def _head(asked: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {"id": "fxrl", "object": kind, "created": 0, "model": asked.get("model", "")}


def _whole(reply: Reply, asked: Mapping[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "message": _wire(reply), "finish_reason": reply["finish_reason"]}
    return {**_head(asked, "chat.completion"), "choices": [choice], "usage": reply["usage"]}


def _events(reply: Reply, asked: Mapping[str, Any]) -> Iterator[bytes]:
    """The same as a stream of two pieces: all of it, and that it is over."""
    head = _head(asked, "chat.completion.chunk")
    for delta, reason in ((_wire(reply), None), ({}, reply["finish_reason"])):
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        yield b"data: " + _json({**head, "choices": [choice]}) + b"\n\n"
    yield b"data: " + _json({**head, "choices": [], "usage": reply["usage"]}) + b"\n\n"
    yield b"data: [DONE]\n\n"


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
