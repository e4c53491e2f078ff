"""Chat completions: what any OpenAI-compatible server answers, whole or streamed, in one form.

Servers differ in the names of fields and in where ids stand; :class:`Reply` is what is left after that. A reply without
ids is text: it is rendered with the target's template and encoded again, and the count of tokens that the server billed
tells whether that gave the tokens that the target produced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyrie.conversation import Reject
from eyrie.engines.base import Answer, Request, answer_seed, with_stop
from eyrie.engines.faults import Action, Fault

# (request, assistant message) -> (context ids, answer ids up to and with the id that ends the turn), as
# `eyrie.render.renderer.Renderer.last_turn` gives them. Raises Reject.
Encode = Callable[[Request, dict[str, Any]], tuple[list[int], list[int]]]

# Servers count the end of turn or do not, and templates write a blank or do not: a few tokens, however long the answer.
DRIFT_TOKENS, DRIFT_SHARE = 4, 0.005
# What a server's parsers leave behind when they did not understand an answer.
UNPARSED = re.compile(r"</?think>|</?tool_call>|<\|tool_call|<\|im_(?:start|end)\|>|<\|channel\|>|\[TOOL_CALLS\]")
# The same inside a reasoning, which may well talk about think tags: a call that the model made while it thought.
UNPARSED_CALL = re.compile(r"<tool_call>|<\|tool_call|\[TOOL_CALLS\]")
_FINISH = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "eos": "stop", "length": "length"}


@dataclass
class Reply:
    """One choice of one chat completion, put together from a body or from the events of a stream."""

    content: str = ""
    reasoning: str = ""
    refusal: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    matched: Any = None
    ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def take(self, event: dict[str, Any]) -> None:
        """Fold a body or a streamed event in."""
        for name in ("id", "model", "provider", "usage"):
            if event.get(name) is not None:
                self.facts[name] = event[name]
        if _ids(event.get("prompt_token_ids")) is not None:
            self.prompt_ids = event["prompt_token_ids"]
        choices = event.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return
        choice = choices[0]
        self.finish = choice.get("finish_reason") or self.finish
        if choice.get("native_finish_reason"):
            self.facts["native_finish_reason"] = choice["native_finish_reason"]
        matched = choice.get("matched_stop", choice.get("stop_reason"))
        self.matched = self.matched if matched is None else matched
        if (ids := _ids(choice.get("token_ids"))) is not None:
            self.ids = [*(self.ids or []), *ids]
        if _ids(choice.get("prompt_token_ids")) is not None:
            self.prompt_ids = choice["prompt_token_ids"]
        message = choice.get("message") or choice.get("delta")
        if isinstance(message, dict):
            self._message(message)

    def _message(self, message: dict[str, Any]) -> None:
        self.content += _text(message.get("content"))
        self.refusal += _text(message.get("refusal"))
        reasoning = _text(message.get("reasoning")) or _text(message.get("reasoning_content"))
        details = message.get("reasoning_details")
        if not reasoning and isinstance(details, list):
            reasoning = "".join(_text(part.get("text")) for part in details if isinstance(part, dict))
        self.reasoning += reasoning
        for call in message.get("tool_calls") or []:
            if isinstance(call, dict):
                self._call(call)

    def _call(self, call: dict[str, Any]) -> None:
        """A whole tool call, or a streamed piece of the call at its ``index``."""
        function = call.get("function") or {}
        index = call.get("index", len(self.tool_calls))
        while isinstance(index, int) and len(self.tool_calls) <= min(index, 256):
            self.tool_calls.append({"type": "function", "id": "", "function": {"name": "", "arguments": ""}})
        held = self.tool_calls[-1 if not isinstance(index, int) else min(index, len(self.tool_calls) - 1)]
        held["id"] = held["id"] or str(call.get("id") or "")
        held["function"]["name"] += str(function.get("name") or "")
        arguments = function.get("arguments")
        held["function"]["arguments"] += arguments if isinstance(arguments, str) else json.dumps(arguments or {})

    @property
    def billed(self) -> int | None:
        """Completion tokens by the server's own count."""
        usage = self.facts.get("usage")
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None

    def to_message(self) -> dict[str, Any]:
        """The assistant message in the form that rows are stored in. Raises :class:`Reject` (``unparsed``)."""
        leftover = UNPARSED.search(self.content) or UNPARSED_CALL.search(self.reasoning)
        if leftover:
            raise Reject("unparsed", f"{leftover[0]!r} in the answer's text")
        if self.reasoning and not self.content.strip() and not self.tool_calls and self.finish != "length":
            raise Reject("unparsed", "a finished answer that is all reasoning: the answer itself may stand inside")
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [_with_parsed_arguments(call) for call in self.tool_calls]
        return message


def answer_of(reply: Reply, request: Request, encode: Encode, facts: dict[str, Any]) -> Answer:
    """What a finished reply is worth: an answer, one that cannot be used, or a :class:`Fault`.

    Partial text of an answer that ended in an error is thrown away.
    """
    facts = {**facts, **reply.facts}
    cost = facts.get("cost")
    if reply.finish == "error":
        raise Fault("error", Action.RETRY, "the answer ended in an error", cost=cost or 0.0)
    if reply.finish == "content_filter" or (reply.refusal and not reply.content):
        return Answer([], "refused", facts={**facts, "why": reply.refusal or "content_filter"})
    kind = _FINISH.get(reply.finish or "")
    said = reply.ids or reply.content or reply.reasoning or reply.tool_calls
    if kind is None or not said:
        detail = f"finish_reason {reply.finish!r}" if said else "no choices, or an answer without text"
        raise Fault("empty", Action.RETRY, detail, cost=cost or 0.0)
    if reply.ids is not None:
        return _served(reply, reply.ids, kind, request, facts)
    try:
        context, ids = encode(request, reply.to_message())
    except Reject as reject:
        return Answer([], "unparsed", facts={**facts, "why": str(reject)})
    billed = reply.billed
    if kind == "length":
        ids = ids[:-1]  # the template ends the turn, the target did not
        if not reply.content and billed and 0 < len(ids) - billed <= DRIFT_TOKENS:
            ids = ids[:billed]  # cut in its reasoning: neither did it close that
    facts["drift"] = None if billed is None else len(ids) - billed
    too_long = len(ids) > request.sampling.max_tokens
    if not ids or too_long or (billed and abs(len(ids) - billed) > max(DRIFT_TOKENS, DRIFT_SHARE * billed)):
        return Answer([], "drifted", facts={**facts, "why": f"{len(ids)} tokens, {billed} were billed"})
    return Answer(ids, kind, context, facts)


def _served(reply: Reply, ids: list[int], kind: str, request: Request, facts: dict[str, Any]) -> Answer:
    """Ids as the server gave them."""
    ids = with_stop(ids, kind, reply.matched)
    if len(ids) > request.sampling.max_tokens:
        raise Fault("empty", Action.RETRY, f"{len(ids)} tokens, max_tokens is {request.sampling.max_tokens}")
    prompt = reply.prompt_ids
    if prompt is not None and prompt != request.prompt_ids:
        facts["prompt_differs"] = True
    return Answer(ids, kind, prompt, facts)


def body_of(model: str, request: Request, reasoning: str) -> dict[str, Any]:
    """What every chat server is asked; ``reasoning`` is its name for that field of a message."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": model,
        "messages": to_openai(request.messages, reasoning),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    if request.tools:
        body["tools"] = request.tools
    if sampling.temperature > 0:
        body["seed"] = answer_seed(request.seed, request.prompt_ids) >> 32  # servers take 31 bits
    return body


def to_openai(messages: list[dict[str, Any]], reasoning: str) -> list[dict[str, Any]]:
    """Stored messages as a chat server wants them; ``reasoning`` is its name for that field."""
    return [_message_to_openai(message, reasoning) for message in messages]


def _message_to_openai(message: dict[str, Any], reasoning: str) -> dict[str, Any]:
    shown = {name: value for name, value in message.items() if name != "reasoning"}
    if message.get("reasoning"):
        shown[reasoning] = message["reasoning"]
    if message.get("tool_calls"):
        shown.setdefault(reasoning, "")  # a thinking target's own service refuses a call without the field
        shown["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
    return shown


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}}


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Arguments as an object, which is what templates expect."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        raise Reject("unparsed", f"arguments of {function['name']!r}: {error}") from None
    if not function["name"] or not isinstance(arguments, dict):
        raise Reject("unparsed", "a tool call without a name, or with arguments that are no object")
    return {**call, "function": {**function, "arguments": arguments}}


def _ids(value: Any) -> list[int] | None:
    """``value`` when it is a list of token ids."""
    return value if isinstance(value, list) and value and all(type(item) is int for item in value) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
