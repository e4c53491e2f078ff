"""Control strings and the text between them: what is remembered, what is hidden, what other tokenizers need."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.conversation import Reject
from eyrie.render.chat_template import load_tokenizer
from eyrie.render.controls import MARKS, ControlEncoder, Trail, mapped, shared_length, strings_of
from eyrie.render.words import Memory
from tests.family_targets import family_target


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ControlEncoder:
    tokenizer = load_tokenizer(family_target("qwen3", tmp_path_factory.mktemp("t")))
    return ControlEncoder(tokenizer, ["<think>", "</think>"])


def test_which_strings_are_controls(encoder: ControlEncoder) -> None:
    named = {"<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"}
    assert encoder.ids_of.keys() == named, "special tokens, and those that the family names"


PIECES = st.lists(st.sampled_from(["<|im_end|>", "<think>", "<|im_", "a", " b", "\n", "end|>"]), max_size=12).map(
    "".join
)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=6))
def test_a_trail_changes_nothing(encoder: ControlEncoder, texts: list[str]) -> None:
    trail = Trail()
    for text in texts:
        assert encoder.follow(text, None, trail) == encoder.ids(text)
        assert trail.counts[-1] <= len(trail.ids)
        assert len(trail.ends) == len(trail.counts)


@given(st.text("ab", max_size=40), st.text("ab", max_size=40))
def test_shared_length(left: str, right: str) -> None:
    n = shared_length(left, right)
    assert left[:n] == right[:n]
    assert n == min(len(left), len(right)) or left[n] != right[n]


def test_the_memory_is_bounded(encoder: ControlEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [encoder.ids(f"{i} words") for i in range(50)]
    monkeypatch.setattr(encoder, "_memory", Memory(30))
    assert [encoder.ids(f"{i} words") for i in range(50)] == expected
    assert 0 < sum(map(len, encoder._memory)) <= 40


def test_a_text_that_holds_every_mark_cannot_be_hidden(encoder: ControlEncoder) -> None:
    text = "".join(MARKS)
    assert encoder.hide(text) == (text, None)
    with pytest.raises(Reject, match="private character"):
        encoder.hide([text, {"<think>": 1}])


def test_json_values_are_walked_keys_and_all() -> None:
    value = {"a": ["b", 1, None, {"c": "d"}]}
    assert strings_of(value) == ["a", "b", "c", "d"]
    assert mapped(value, str.upper) == {"A": ["B", 1, None, {"C": "D"}]}


def test_tokens_that_swallow_white_space_do_so_piece_by_piece(tmp_path: Path) -> None:
    folder = family_target("chatml", tmp_path)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    for token in content["added_tokens"]:
        token["lstrip"], token["rstrip"] = token["content"] == "<|im_start|>", token["content"] == "<|im_end|>"
    path.write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    encoder = ControlEncoder(tokenizer, [])
    text = "a \n<|im_start|> b <|im_end|>\n\n c <|im_end|><|im_start|>"
    assert encoder.ids(text) == tokenizer.encode(text, add_special_tokens=False)
    trail = Trail()
    encoder.follow("<|im_end|>", None, trail)
    assert encoder.follow("<|im_end|>  d", None, trail) == encoder.ids("<|im_end|>  d") == encoder.ids("<|im_end|>d")


@pytest.mark.parametrize("own", [True, False])
def test_a_tokenizer_without_a_backend(own: bool) -> None:
    """Slow tokenizers: the library's switch, or that of tiktoken-based code that comes with the weights."""
    asked: list[dict[str, Any]] = []

    def tiktoken_like(text: str, allow_special_tokens: bool = True, **options: Any) -> list[int]:
        asked.append({"allow_special_tokens": allow_special_tokens, **options})
        return [ord(c) for c in text]

    def library_like(text: str, **options: Any) -> list[int]:
        asked.append(options)
        return [ord(c) for c in text]

    token = SimpleNamespace(content="<e>", special=True, lstrip=False, rstrip=False)
    tokenizer = SimpleNamespace(
        added_tokens_decoder={5000: token}, encode=tiktoken_like if own else library_like, backend_tokenizer=None
    )
    assert ControlEncoder(tokenizer, []).ids("ab<e>c") == [97, 98, 5000, 99]
    wanted = {"allow_special_tokens": False} if own else {"add_special_tokens": False, "split_special_tokens": True}
    assert asked == [wanted, wanted]
