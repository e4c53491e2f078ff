"""Encoding word by word gives the tokenizer's own ids, or declines."""

from __future__ import annotations

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import eyrie.render.words
from eyrie.render.words import WordEncoder
from tests.family_targets import base_bpe

# Cuts as the families have them: contractions, letters with one sign before, numbers alone or by threes, lines.
LINES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|\s?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
THREES = LINES.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def split(pattern: str, behavior: str = "Isolated") -> dict[str, Any]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [cut, level]}


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
DIGITS = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
KNOWN = {"gpt2": GPT2, "digits": DIGITS, "lines": split(LINES), "threes": split(THREES)}
UNKNOWN = {
    "other class": split(r"\p{P}+|[^\p{P}]+"),
    "intersection": split(r"[\p{L}&&[^\p{N}]]+|."),
    "removed": split(LINES, "Removed"),
    "prefix": {**GPT2, "add_prefix_space": True},
    "other kind": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True},
}


def made(cut: dict[str, Any], **changes: Any) -> tuple[Tokenizer, WordEncoder | None]:
    content = {**base_bpe(), "pre_tokenizer": cut, **changes}
    tokenizer = Tokenizer.from_str(json.dumps(content))
    return tokenizer, WordEncoder.of(tokenizer, content)


ENCODERS = {name: made(cut) for name, cut in KNOWN.items()}
TEXT = st.text(string.printable, max_size=80) | st.lists(
    st.sampled_from(
        ["the", " fox", "'s", "'LL", "\n", "\r\n", "  ", "\t", "12345", "x1", "_", "...", "\u00e9", "\x1c"]
    ),
    max_size=20,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(KNOWN)), TEXT)
def test_ids_are_those_of_the_tokenizer(name: str, text: str) -> None:
    tokenizer, words = ENCODERS[name]
    assert words is not None
    ids = words.ids(text)
    if set(text) <= set(string.printable) - set("\x0b\x0c"):
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids
    else:
        assert ids is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_cuts_are_left_to_the_tokenizer(name: str) -> None:
    assert made(UNKNOWN[name])[1] is None


def test_a_normalizer_that_changes_ascii_is_not_known() -> None:
    assert made(GPT2, normalizer={"type": "Lowercase"})[1] is None
    assert made(GPT2, normalizer={"type": "NFC"})[1] is not None


def test_added_tokens_that_are_text_are_left_to_the_tokenizer() -> None:
    token = {"id": 500, "content": "<fim>", "special": False, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}  # fmt: skip
    tokenizer, words = made(GPT2, added_tokens=[token])
    assert words is not None
    assert words.ids("a <fim> b") is None
    assert words.ids("a <fi> b") == tokenizer.encode("a <fi> b").ids
    assert tokenizer.token_to_id("<fim>") in tokenizer.encode("a <fim> b").ids


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, words = made(GPT2)
    assert words is not None
    monkeypatch.setattr(eyrie.render.words, "REMEMBERED_WORDS", 5)
    for number in range(40):
        text = f"word{number} and some more of them"
        assert words.ids(text) == tokenizer.encode(text).ids
    assert len(words._memory) <= 5 + 8
