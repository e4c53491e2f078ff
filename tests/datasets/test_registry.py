"""Adapters are found by name and checked for their options."""

from __future__ import annotations

import pytest

from eyrie.datasets import ADAPTERS, find_adapter
from eyrie.errors import EyrieError


def test_the_adapters_that_ship() -> None:
    assert {"human-eval", "writingbench", "bfcl", "chitchat", "jsonl"} <= set(ADAPTERS)


def test_a_misspelled_adapter_suggests_the_right_one() -> None:
    with pytest.raises(EyrieError, match="did you mean 'chitchat'"):
        find_adapter("chitchats")


def test_a_misspelled_option_suggests_the_right_one() -> None:
    with pytest.raises(EyrieError, match="no such option 'langage'; did you mean 'language'"):
        find_adapter("writingbench").open({"langage": "en"})


def test_an_option_of_another_type_is_refused() -> None:
    with pytest.raises(EyrieError, match="option 'turns' must be of type int, got '2'"):
        find_adapter("chitchat").open({"turns": "2"})
    with pytest.raises(EyrieError, match="option 'turns' must be of type int, got True"):
        find_adapter("chitchat").open({"turns": True})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("writingbench", {"language": "fr"}, "choose any, en or zh"),
        ("chitchat", {"part": "third"}, "choose all, prompts or conversations"),
        ("chitchat", {"turns": -1}, "cannot be negative"),
        ("jsonl", {}, "needs `path`"),
    ],
)
def test_impossible_options_are_one_line_errors(name: str, options: dict, message: str) -> None:
    with pytest.raises(EyrieError, match=message) as caught:
        list(find_adapter(name).open(options))
    assert "\n" not in str(caught.value)
