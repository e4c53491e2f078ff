"""Encoding plain text word by word.

A BPE tokenizer cuts text into words by a pattern and encodes each word by itself, so words can be remembered: most of a
text is words seen before, and looking them up is several times faster than encoding them again. The cut is done here
with Python's own ``re``, and only where it is certain to be the tokenizer's: patterns made of letter, number and space
classes, no added token inside, and characters whose class no version of Unicode changes (ASCII without control
characters, Latin, Cyrillic, Chinese, Japanese, Korean, and signs). Everything else is left to the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from typing import Any

REMEMBERED_CHARS = 1 << 22  # up to 300 MB of words and ids, when the words are Chinese
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The characters that are cut here, by class, as they stand inside brackets. A normalizer of the kind NFC leaves all of
# them as they are; one of the kind NFKC does so with ASCII alone.
LETTERS = (
    "A-Za-z\u00aa\u00b5\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u017e\u0400-\u0481\u3005\u3041-\u3096\u30a1-\u30fa\u30fc-\u30fe\u4e00-\u9fa5"
    "\uac00-\ud7a3\uff21-\uff3a\uff41-\uff5a"
)
NUMBERS = "0-9\u00b2\u00b3\u00b9\u00bc-\u00be\u2460-\u249b\uff10-\uff19"
OTHERS = (  # white space and signs
    "\t\n\r -/:-@\\[-`{-~\u00a0-\u00a9\u00ab-\u00b1\u00b4\u00b6-\u00b8\u00bb\u00bf\u00d7\u00f7"
    "\u2002-\u200a\u2010-\u2027\u2030-\u205e\u2190-\u22ff\u2500-\u25ff\u3000-\u3003\u3008-\u3020\u30fb"
    "\uff01-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65"
)
UNSAFE = re.compile(f"[^{LETTERS}{NUMBERS}{OTHERS}]")
OTHER_CLASSES = ("\\p", "\\P", "\\w", "\\W", "\\d", "\\D", "\\b")  # of a pattern; what they hold differs by engine
NOT_ASCII = re.compile(r"[^\t\n\r -~]")
# Cases in which one pattern cuts otherwise than another.
TRIAL = (
    "It's I'LL we've  two   spaces\n\n\nlines \n x\t\ttabs \r\n 12345 3.14 a1b2 __init__(self) -> None: # ok?! ...  "
    "http://x.y/z?q=1&r=2 'quoted' \"d'd\" CamelCase snake_case <b>\n    return {'k': [1, 22, 333]}\n\n  \n end "
)
FOREIGN_TRIAL = (
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002abc\u4f60 \u597d12\u3000\u3000\u4e00\u300a\u4e66\u300b "
    "\u2014\u2014 caf\u00e9's \u00a0x \uff12\u2461\u00bd \u201cq\u201d \u041f\u0440\u0438\u0432\u0435\u0442 "
    "\u3072\u3089\u30ab\u30ca \ud55c\uae00 \u2192\u2203\u25a0 \uff21\uff42\uff01\n\u3000\n"
)


class Memory(dict[str, list[int]]):
    """Texts with their ids. Starts anew once it holds more than ``limit`` characters."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit, self._chars = limit, 0

    def missing(self, texts: Iterable[str]) -> list[str]:
        """Those of ``texts`` that are to be encoded, each once."""
        if self._chars > self._limit:
            self.clear()
            self._chars = 0
        return [text for text in dict.fromkeys(texts) if text not in self]

    def keep(self, texts: list[str], ids: Iterable[list[int]]) -> None:
        self.update(zip(texts, ids, strict=True))
        self._chars += sum(map(len, texts))


class WordEncoder:
    """Remembers the ids of words. Made by :meth:`of`.

    Args:
        plain: a ``tokenizers.Tokenizer`` that encodes control strings as text.
        stages: patterns that cut text one after the other, each the pieces of the one before.
        unsafe: what no text may hold: other characters, and added tokens that the tokenizer cuts out of any text.
    """

    def __init__(self, plain: Any, stages: list[re.Pattern[str]], unsafe: re.Pattern[str]) -> None:
        self._plain, self._stages, self._unsafe = plain, stages, unsafe
        self._memory = Memory(REMEMBERED_CHARS)

    @classmethod
    def of(cls, plain: Any, content: dict[str, Any]) -> WordEncoder | None:
        """An encoder for a tokenizer and the content of its ``tokenizer.json``; None when its cut is not known."""
        normal = content.get("normalizer")
        patterns = _patterns(content.get("pre_tokenizer") or {})
        known = content["model"]["type"] == "BPE" and not content["model"].get("dropout")
        if not patterns or not known or not (normal is None or normal["type"] in ("NFC", "NFKC")):
            return None
        try:
            stages = [re.compile(_spelled(pattern)) for pattern in patterns]
        except (re.error, ValueError):
            return None
        apart = [re.escape(token["content"]) for token in content["added_tokens"] if not token["special"]]
        kinds = [(UNSAFE, TRIAL + FOREIGN_TRIAL), (NOT_ASCII, TRIAL)]
        for unsafe, trial in kinds[1:] if normal and normal["type"] == "NFKC" else kinds:
            found = cls(plain, stages, re.compile("|".join([unsafe.pattern, *apart])))
            if found.ids(trial) == plain.encode(trial, add_special_tokens=False).ids:
                return found
        return None

    def cut(self, text: str) -> list[str] | None:
        """The words of ``text``; None when it must be left to the tokenizer."""
        if self._unsafe.search(text):
            return None
        words = [text]
        for stage in self._stages:
            words = (
                stage.findall(words[0]) if len(words) == 1 else [word for part in words for word in stage.findall(part)]
            )
        return words if sum(map(len, words)) == len(text) else None

    def ids(self, text: str) -> list[int] | None:
        """Ids of ``text``; None when it must be left to the tokenizer."""
        words = self.cut(text)
        if words is None:
            return None
        memory = self._memory
        try:
            return list(chain.from_iterable(map(memory.__getitem__, words)))
        except KeyError:
            if not self._learn(words):
                return None
        return list(chain.from_iterable(map(memory.__getitem__, words)))

    def _learn(self, words: list[str]) -> bool:
        """Remember new words. False when one of them is no single word when it stands alone."""
        new = self._memory.missing(words)
        if any(stage.findall(word) != [word] for word in new for stage in self._stages):
            return False
        encoded = self._plain.encode_batch_fast(new, add_special_tokens=False)
        self._memory.keep(new, (encoding.ids for encoding in encoded))
        return True


def _patterns(spec: dict[str, Any]) -> list[str] | None:
    """The patterns of a pre-tokenizer, in their order; None when it does something else too."""
    kind = spec.get("type")
    if kind == "Sequence":
        parts = [_patterns(inner) for inner in spec["pretokenizers"]]
        return None if any(part is None for part in parts) else [pattern for part in parts for pattern in part or []]
    if kind == "ByteLevel" and not spec.get("add_prefix_space"):
        return [GPT2] if spec.get("use_regex", True) else []
    if kind == "Digits":
        return [r"\p{N}|[^\p{N}]+" if spec.get("individual_digits") else r"\p{N}+|[^\p{N}]+"]
    if kind == "Split" and spec.get("behavior") == "Isolated" and not spec.get("invert"):
        pattern = spec["pattern"]
        return [pattern["Regex"]] if "Regex" in pattern else None
    return None


def _spelled(pattern: str) -> str:
    """The pattern with letter and number classes spelled out. Raises ValueError for any other class but ``\\s``."""
    out: list[str] = []
    inside = False
    position = 0
    while position < len(pattern):
        found = re.compile(r"\\p\{([LN])\}").match(pattern, position)
        if found:
            members = LETTERS if found[1] == "L" else NUMBERS
            out.append(members if inside else f"[{members}]")
            position = found.end()
            continue
        step = 2 if pattern[position] == "\\" else 1
        piece = pattern[position : position + step]
        if piece in OTHER_CLASSES or (piece == "[" and inside) or pattern.startswith("&&", position):
            raise ValueError(f"{pattern}: has a class that is not known here")
        inside = piece == "[" or (inside and piece != "]")
        out.append(piece)
        position += step
    return "".join(out)
