"""Encoding plain ASCII text word by word.

A BPE tokenizer cuts text into words by a pattern and encodes each word by itself, so words can be remembered: most of a
text is words seen before, and looking them up is several times faster than encoding them again. The cut is done here
with Python's own ``re``, and only where it is certain to be the tokenizer's: ASCII text without control characters,
patterns made of letter, number and space classes, no added token inside. Everything else is left to the tokenizer.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

REMEMBERED_WORDS = 1_000_000
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UNSAFE = re.compile(r"[^\t\n\r -~]")
# Cases in which one pattern cuts otherwise than another.
TRIAL = (
    "It's I'LL we've  two   spaces\n\n\nlines \n x\t\ttabs \r\n 12345 3.14 a1b2 __init__(self) -> None: # ok?! ...  "
    "http://x.y/z?q=1&r=2 'quoted' \"d'd\" CamelCase snake_case <b>\n    return {'k': [1, 22, 333]}\n\n  \n end "
)


class WordEncoder:
    """Remembers the ids of words. Made by :meth:`of`.

    Args:
        plain: a ``tokenizers.Tokenizer`` that encodes control strings as text.
        stages: patterns that cut text one after the other, each the pieces of the one before.
        unsafe: what no text may hold: other characters, and added tokens that the tokenizer cuts out of any text.
    """

    def __init__(self, plain: Any, stages: list[re.Pattern[str]], unsafe: re.Pattern[str]) -> None:
        self._plain, self._stages, self._unsafe = plain, stages, unsafe
        self._memory: dict[str, list[int]] = {}

    @classmethod
    def of(cls, plain: Any, content: dict[str, Any]) -> WordEncoder | None:
        """An encoder for a tokenizer and the content of its ``tokenizer.json``; None when its cut is not known."""
        normal = content.get("normalizer")
        patterns = _patterns(content.get("pre_tokenizer") or {})
        known = content["model"]["type"] == "BPE" and not content["model"].get("dropout")
        if not patterns or not known or not (normal is None or normal["type"] in ("NFC", "NFKC")):
            return None
        try:
            stages = [re.compile(_ascii(pattern), re.ASCII) for pattern in patterns]
        except (re.error, ValueError):
            return None
        apart = [re.escape(token["content"]) for token in content["added_tokens"] if not token["special"]]
        found = cls(plain, stages, re.compile("|".join([UNSAFE.pattern, *apart])))
        return found if found.ids(TRIAL) == plain.encode(TRIAL, add_special_tokens=False).ids else None

    def ids(self, text: str) -> list[int] | None:
        """Ids of ``text``; None when it must be left to the tokenizer."""
        if not text.isascii() or self._unsafe.search(text):
            return None
        words = [text]
        for stage in self._stages:
            words = (
                stage.findall(words[0]) if len(words) == 1 else [word for part in words for word in stage.findall(part)]
            )
        if sum(map(len, words)) != len(text):
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
        if len(self._memory) > REMEMBERED_WORDS:
            self._memory.clear()
        new = [word for word in dict.fromkeys(words) if word not in self._memory]
        if any(stage.findall(word) != [word] for word in new for stage in self._stages):
            return False
        encoded = self._plain.encode_batch_fast(new, add_special_tokens=False)
        self._memory.update((word, encoding.ids) for word, encoding in zip(new, encoded, strict=True))
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


def _ascii(pattern: str) -> str:
    """The pattern with letter and number classes spelled out for ASCII. Raises ValueError for any other class."""
    out: list[str] = []
    inside = False
    position = 0
    while position < len(pattern):
        found = re.compile(r"\\p\{([LN])\}").match(pattern, position)
        if found:
            letters = "A-Za-z" if found[1] == "L" else "0-9"
            out.append(letters if inside else f"[{letters}]")
            position = found.end()
            continue
        step = 2 if pattern[position] == "\\" else 1
        piece = pattern[position : position + step]
        if piece in ("\\p", "\\P", "&&") or (piece == "[" and inside) or pattern.startswith("&&", position):
            raise ValueError(f"{pattern}: has a class that is not known here")
        inside = piece == "[" or (inside and piece != "]")
        out.append(piece)
        position += step
    return "".join(out)
