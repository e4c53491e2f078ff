"""Conversations -> token ids, and the spans that the assistant produced.

Text becomes ids the way the target sees it when it is served: the chat template renders the conversation, its control
strings become control ids. What a person wrote never does: a message that quotes ``<|im_end|>`` is encoded as plain
characters. Spans are found by rendering a conversation with and without its last turn, never by searching text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyrie.conversation import Reject
from eyrie.errors import EyrieError

# A control string inside a message is rendered as <mark><number><mark>, and put back once the template has run.
MARKS = ("\ue000", "\ue001", "\uf8fe", "\U000f0000")


@dataclass(frozen=True)
class TurnRow:
    """One supervised assistant turn.

    Attributes:
        turn: index of the assistant message in the conversation.
        input_ids: context and answer, up to and with the id that ends the turn.
        start: first position of the answer; the answer is ``input_ids[start:]``.
        prompt_text: the last user turn before the answer.
    """

    turn: int
    input_ids: list[int]
    start: int
    prompt_text: str


class Renderer:
    """Renders conversations with a target's own tokenizer and chat template.

    Args:
        model_dir: Hugging Face folder that holds the tokenizer, or a hub id.
        stop_ids: ids that end a turn; default: the tokenizer's eos and the known ends of turn.
    """

    def __init__(self, model_dir: Path | str, stop_ids: Sequence[int] | None = None) -> None:
        from eyrie.targets.card import TURN_ENDS, resolve

        self.folder = resolve(str(model_dir))
        self.tokenizer = load_tokenizer(self.folder)
        self._template = template_of(self.tokenizer, self.folder)
        added = self.tokenizer.added_tokens_decoder
        self._specials: dict[str, int] = {token.content: id for id, token in added.items() if token.special}
        longest_first = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        if stop_ids is None:
            named = [self._specials[name] for name in TURN_ENDS if name in self._specials]
            eos = self.tokenizer.eos_token_id
            stop_ids = [*named, *([] if eos is None else [eos])]
        self.stop_ids = frozenset(stop_ids)
        self._tools_render: dict[bool, bool] = {}
        self._segments_agree: bool | None = None

    def prompt_ids(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of the conversation with the generation prompt: what a server feeds the model before it answers.

        Raises:
            EyrieError: tools are declared and the template does not render them.
            Reject: the template refuses the conversation.
        """
        self.check_tools(messages, tools)
        return self._ids(messages, tools, generation=True)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, control tokens left out."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def turn_rows(
        self,
        messages: Sequence[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        max_length: int | None = None,
    ) -> list[TurnRow | Reject]:
        """One row per assistant turn, each with the context that a server would have rendered for it.

        A turn whose answer cannot be told from its context, or that is longer than ``max_length`` ids, is a
        :class:`Reject` in the list, never a guess.
        """
        self.check_tools(messages, tools)
        rows: list[TurnRow | Reject] = []
        full = False  # the context alone is too long, so that of every later turn is too
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                if full:
                    raise Reject("too_long")
                row = self._turn_row(messages, tools, turn)
                if max_length is not None and len(row.input_ids) > max_length:
                    full = row.start >= max_length
                    raise Reject("too_long")
                rows.append(row)
            except Reject as reject:
                rows.append(reject)
        return rows

    def check_tools(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> None:
        """Refuse tools that the template would leave out without a word. Decided once per renderer."""
        if not tools:
            return
        has_system = messages[0]["role"] == "system"
        if has_system not in self._tools_render:
            without = self._render(messages[:2], None, generation=True)
            self._tools_render[has_system] = self._render(messages[:2], tools, generation=True) != without
        if not self._tools_render[has_system]:
            raise EyrieError(
                f"{self.folder}: its chat template does not render tool declarations; set `tools: drop` for this "
                "dataset to ask its questions without tools, or use a target whose template knows tools"
            )

    def _turn_row(self, messages: Sequence[dict[str, Any]], tools: Any, turn: int) -> TurnRow:
        prompt = self._ids(messages[:turn], tools, generation=True)
        finished = self._ids(messages[: turn + 1], tools, generation=False)
        start = len(prompt)
        if finished[:start] != prompt:
            history = self._ids(messages[:turn], tools, generation=False)
            start = common_prefix(prompt, finished)
            if finished[: len(history)] != history or start < len(history):
                raise Reject("unstable_boundary", f"turn {turn}")
        end = max((i + 1 for i in range(start, len(finished)) if finished[i] in self.stop_ids), default=0)
        if end == 0:
            raise Reject("no_stop_id", f"turn {turn}")
        reasoning = messages[turn].get("reasoning")
        if reasoning and self.decode(finished[start:end]).find(reasoning.strip()) < 0:
            raise Reject("reasoning_dropped", f"turn {turn}")
        asked = [message["content"] for message in messages[:turn] if message["role"] == "user"]
        return TurnRow(turn, finished[:end], start, asked[-1] if asked else "")

    def _ids(self, messages: Sequence[dict[str, Any]], tools: Any, *, generation: bool) -> list[int]:
        quoted = [text for message in messages for text in _strings(message) if self._special_pattern.search(text)]
        if not quoted:
            rendered = self._render(messages, tools, generation=generation)
            return list(self.tokenizer.encode(rendered, add_special_tokens=False))
        if self._segments_agree is None:
            plain = self._render([{"role": "user", "content": "a b\nc"}], None, generation=True)
            self._segments_agree = self._encode_segments(plain, str) == list(
                self.tokenizer.encode(plain, add_special_tokens=False)
            )
        if not self._segments_agree:
            raise Reject("template_refused", "quotes a control string, which this tokenizer cannot encode as text")
        taken = "".join(_strings(list(messages)))
        mark = next((mark for mark in MARKS if mark not in taken), None)
        if mark is None:
            raise Reject("template_refused", "holds every private character that protects a quoted control string")
        names = list(self._specials)
        numbers = {name: f"{mark}{number}{mark}" for number, name in enumerate(names)}

        def hide(text: str) -> str:
            return self._special_pattern.sub(lambda found: numbers[found[0]], text)

        def show(text: str) -> str:
            return re.sub(f"{mark}(\\d+){mark}", lambda found: names[int(found[1])], text)

        hidden = [_mapped(message, hide) for message in messages]
        return self._encode_segments(self._render(hidden, tools, generation=generation), show)

    def _encode_segments(self, rendered: str, show: Callable[[str], str]) -> list[int]:
        """Encode text between control strings as plain characters, and the control strings as their ids."""
        ids: list[int] = []
        position = 0
        for found in [*self._special_pattern.finditer(rendered), None]:
            text = show(rendered[position : found.start() if found else None])
            if text:
                ids += self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
            if found:
                ids.append(self._specials[found[0]])
                position = found.end()
        return ids

    def _render(self, messages: Sequence[dict[str, Any]], tools: Any, *, generation: bool) -> str:
        from jinja2 import TemplateError

        shown = [_for_template(message) for message in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                shown, tools=tools or None, add_generation_prompt=generation, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise Reject("template_refused", " ".join(str(error).split())[:120]) from None
        return str(text)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face folder. Raises :class:`EyrieError` when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = " ".join(str(error).split())[:160]
        raise EyrieError(
            f"{folder}: its tokenizer cannot be loaded ({why}); copy the tokenizer's files there"
        ) from error


def template_of(tokenizer: Any, folder: Path) -> str:
    """The chat template's text (the default one of several). Raises :class:`EyrieError` when there is none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise EyrieError(
            f"{folder}: the tokenizer has no chat template; use an instruction-tuned model, or add chat_template.jinja"
        )
    return str(template)


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many ids the two share from the start."""
    for position, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return position
    return min(len(left), len(right))


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """Templates call the reasoning ``reasoning_content``."""
    if "reasoning" not in message:
        return message
    return {**message, "reasoning_content": message["reasoning"]}


def _strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _strings(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _strings(inner)]
    return []


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every string changed, keys left as they are."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [_mapped(inner, change) for inner in value]
    return value
