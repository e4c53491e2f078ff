"""The form in which a chat template takes tool calls, found by trying, and whether it wrote them.

Most templates take the arguments as an object and an empty text as ``""``. DeepSeek's look whether the text is null to
see that there are calls, and join the arguments to a string: in another form the calls are lost without a word.
"""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyrie.conversation import Reject

Message = dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """``as_text``: arguments are JSON text. ``null_content``: an answer that says nothing beside its calls has null."""

    as_text: bool = False
    null_content: bool = False

    def of(self, message: Message) -> Message:
        """The message in this form; one without tool calls is left alone."""
        calls = message.get("tool_calls")
        if not calls or self == PLAIN:
            return message
        content = None if self.null_content and not message["content"] else message["content"]
        return {**message, "content": content, "tool_calls": [self._call(call) for call in calls]}

    def _call(self, call: Message) -> Message:
        function = call.get("function") or call
        arguments = function.get("arguments")
        if not self.as_text or isinstance(arguments, str):
            return call
        function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function


PLAIN = CallForm()
FORMS = (PLAIN, CallForm(null_content=True), CallForm(as_text=True), CallForm(as_text=True, null_content=True))
NAME, WORD = "lookup", "zebra"


def find_form(render: Callable[[list[Message]], str]) -> CallForm:
    """The first form in which the template writes a call's name and its argument; the plain one when there is none.

    Args:
        render: text of a finished conversation; raises :class:`Reject` where the template refuses it.
    """
    function = {"name": NAME, "arguments": {"word": WORD}}
    call = {"id": f"functions.{NAME}:0", "type": "function", "function": function}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    for form in FORMS:
        try:
            text = render([{"role": "user", "content": "What is it?"}, form.of(answer)])
        except Reject:
            continue
        if NAME in text and WORD in text:
            return form
    return PLAIN


def lost_of_calls(answer: str, message: Message) -> str:
    """What a turn with tool calls has and its rendered answer has not; "" when nothing is missing.

    Llama's templates write the call alone, gpt-oss's the first call of several: such a turn is not what was said.
    """
    calls = message.get("tool_calls") or []
    names = Counter((call.get("function") or call)["name"] for call in calls)
    for name, count in names.items():
        if answer.count(name) < count:
            return f"a call of {name}"
    beside = bool(calls) and _letters(message.get("content") or "") not in _letters(answer)
    return "what is said beside the calls" if beside else ""


def _letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).split())
