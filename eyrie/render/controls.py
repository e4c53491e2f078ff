"""Rendered text -> token ids: control strings become their ids, everything between them is plain text.

What a person wrote never becomes a control id: :meth:`ControlEncoder.hide` takes control strings out of a message
before the template runs, and the encoder puts them back as plain characters. Text between two control strings is
encoded once and remembered, so a long history costs nothing the second time.
"""

from __future__ import annotations

import inspect
import json
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyrie.conversation import Reject
from eyrie.render.words import Memory, WordEncoder

# A control string inside a message is rendered as <mark><number><mark>, and put back once the template has run.
MARKS = ("\ue000", "\ue001", "\uf8fe", "\U000f0000")
REMEMBERED_CHARS = 1 << 24  # about 100 MB of text and ids


@dataclass(frozen=True)
class Quotes:
    """How the control strings that stand in one conversation's messages are hidden."""

    mark: str


@dataclass
class Trail:
    """The last text of a conversation that was encoded: what the next one shares with it is not encoded again.

    ``ends`` and ``counts`` say how many ids the text has up to the end of each control string.
    """

    text: str = ""
    ids: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    counts: list[int] = field(default_factory=lambda: [0])


class ControlEncoder:
    """Encodes rendered text with a target's tokenizer.

    Args:
        tokenizer: a tokenizer as transformers loads it.
        also: names of added tokens that are control strings though they are not flagged as special.

    Attributes:
        ids_of: control string -> id.
    """

    def __init__(self, tokenizer: Any, also: list[str]) -> None:
        added = tokenizer.added_tokens_decoder
        self.ids_of = {token.content: id for id, token in added.items() if token.special or token.content in also}
        tokens = {token.content: token for token in added.values()}
        self._eats_left = {name for name in self.ids_of if tokens[name].lstrip}
        self._eats_right = {name for name in self.ids_of if tokens[name].rstrip}
        longest_first = sorted(self.ids_of, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._firsts = sorted({name[0] for name in self.ids_of})
        self._names = list(self.ids_of)
        self._name_of = {id: name for name, id in self.ids_of.items()}
        self._encode = _plain_encoder(tokenizer, set(self.ids_of))
        self._memory = Memory(REMEMBERED_CHARS)

    def hide(self, value: Any) -> tuple[Any, Quotes | None]:
        """``value`` (messages, tools) with marks in place of control strings; None when it holds no control string.

        Raises:
            Reject: it holds every character that could serve as a mark.
        """
        texts = strings_of(value)
        if not any(self._may_hold(text) and self._pattern.search(text) for text in texts):
            return value, None
        mark = next((mark for mark in MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise Reject("template_refused", "holds every private character that protects a quoted control string")
        numbers = {name: f"{mark}{number}{mark}" for number, name in enumerate(self._names)}
        return mapped(value, lambda text: self._pattern.sub(lambda at: numbers[at[0]], text)), Quotes(mark)

    def show(self, text: str, quotes: Quotes | None) -> str:
        """``text`` with the hidden control strings put back."""
        if quotes is None or quotes.mark not in text:
            return text
        return re.sub(f"{quotes.mark}(\\d+){quotes.mark}", lambda found: self._names[int(found[1])], text)

    def ids(self, text: str, quotes: Quotes | None = None) -> list[int]:
        """Ids of rendered text."""
        return self.follow(text, quotes, Trail())

    def follow(self, text: str, quotes: Quotes | None, trail: Trail) -> list[int]:
        """Ids of rendered text; ``trail`` is brought up to it. The list belongs to the caller."""
        step = bisect_right(trail.ends, shared_length(text, trail.text)) - 1
        ids = trail.ids[: trail.counts[step]]
        del trail.ends[step + 1 :], trail.counts[step + 1 :]
        pieces = self._split(text, trail.ends[-1])
        self._learn([self.show(piece, quotes) for piece, _, _ in pieces if piece])
        for piece, control, end in pieces:
            if piece:
                ids += self._memory[self.show(piece, quotes)]
            if control:
                ids.append(self.ids_of[control])
                trail.ends.append(end)
                trail.counts.append(len(ids))
        trail.text, trail.ids = text, ids
        return ids.copy()

    def last(self, trail: Trail) -> str:
        """The last control string of the text that ``trail`` stands at; "" when it has none."""
        return self._name_of[trail.ids[trail.counts[-1] - 1]] if len(trail.ends) > 1 else ""

    def quotes_as_text(self) -> bool:
        """Whether every control string can be encoded as plain text, without any control id."""
        taken = set(self.ids_of.values())
        return all(taken.isdisjoint(ids) for ids in self._encode(self._names))

    def controls(self, text: str) -> list[str]:
        """The control strings of rendered text, in order."""
        return self._pattern.findall(text)

    def words(self, text: str, ends: set[str]) -> str:
        """The plain text before the first control string of ``ends``, pieces parted by a NUL."""
        ended = self.cut_behind(text, ends)
        return self._pattern.sub("\0", text if ended is None else ended)

    def cut_behind(self, text: str, names: set[str]) -> str | None:
        """``text`` up to and with the first control string of ``names``; None when there is none."""
        for found in self._pattern.finditer(text):
            if found[0] in names:
                return text[: found.end()]
        return None

    def _split(self, text: str, start: int) -> list[tuple[str, str, int]]:
        """Plain text, the control string behind it ("" at the end), and where that ends."""
        pieces: list[tuple[str, str, int]] = []
        eaten = any(text.endswith(name, 0, start) for name in self._eats_right)
        for found in self._pattern.finditer(text, start):
            pieces.append((self._trimmed(text[start : found.start()], eaten, found[0]), found[0], found.end()))
            start, eaten = found.end(), found[0] in self._eats_right
        pieces.append((self._trimmed(text[start:], eaten, ""), "", len(text)))
        return pieces

    def _trimmed(self, text: str, eaten: bool, follower: str) -> str:
        """Some added tokens swallow the white space beside them."""
        text = text.lstrip() if eaten else text
        return text.rstrip() if follower in self._eats_left else text

    def _learn(self, texts: list[str]) -> None:
        if new := self._memory.missing(texts):
            self._memory.keep(new, self._encode(new))

    def _may_hold(self, text: str) -> bool:
        return any(first in text for first in self._firsts)


def _plain_encoder(tokenizer: Any, controls: set[str]) -> Callable[[list[str]], list[list[int]]]:
    """A function that encodes texts as if no control string existed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        from tokenizers import Tokenizer

        content = json.loads(backend.to_str())
        for token in content["added_tokens"]:
            token["special"] = token["content"] in controls
        content["truncation"] = content["padding"] = None
        plain = Tokenizer.from_str(json.dumps(content))
        plain.encode_special_tokens = True  # as text, that is

        words = WordEncoder.of(plain, content)

        def together(texts: list[str]) -> list[list[int]]:
            found = [words.ids(text) if words else None for text in texts]
            left = [text for text, ids in zip(texts, found, strict=True) if ids is None]
            encoded = iter(plain.encode_batch_fast(left, add_special_tokens=False) if left else ())
            return [next(encoded).ids if ids is None else ids for ids in found]

        return together
    takes = inspect.signature(tokenizer.encode).parameters
    options = (
        {"allow_special_tokens": False}  # tiktoken-based tokenizers that come with the weights
        if "allow_special_tokens" in takes
        else {"add_special_tokens": False, "split_special_tokens": True}
    )

    def one_by_one(texts: list[str]) -> list[list[int]]:
        return [list(tokenizer.encode(text, **options)) for text in texts]

    return one_by_one


def shared_length(left: str, right: str) -> int:
    """How many characters the two share from the start, by halving (a character loop would cost more than encoding)."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


def strings_of(value: Any) -> list[str]:
    """Every string in a JSON-like value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for item in value.items() for inner in item for text in strings_of(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in strings_of(inner)]
    return []


def mapped(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON-like value with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {mapped(key, change): mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list):
        return [mapped(inner, change) for inner in value]
    return value
