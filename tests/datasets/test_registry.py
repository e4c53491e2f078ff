"""Adapters are found by name and checked for their options."""

from __future__ import annotations

from typing import Any

import pytest

from eyrie.config import parse_config
from eyrie.datasets import ADAPTERS, check_sources, find_adapter
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


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"adapter": "gsm9k"}, "datasets.mine: no dataset adapter 'gsm9k'; did you mean 'gsm8k'?"),
        (
            {"adapter": "chitchat", "options": {"prt": "x"}},
            "datasets.mine: adapter chitchat: no such option 'prt'; did",
        ),
        ({"adapter": "chitchat", "path": "x.jsonl"}, "datasets.mine: adapter chitchat: reads no `path`; remove it"),
    ],
)
def test_a_config_is_held_against_its_adapters_before_anything_is_read(section: dict[str, Any], said: str) -> None:
    least = {"run": "r", "target": {"model": "m"}, "datasets": {"own": {"adapter": "jsonl", "token_budget": 1}}}
    check_sources(parse_config(least))
    with pytest.raises(EyrieError) as caught:
        check_sources(parse_config({**least, "datasets": {"mine": {"token_budget": 1, **section}}}))
    assert str(caught.value).startswith(said)
    with pytest.raises(
        EyrieError, match=r"^bench\.suites\.he: no dataset adapter .humaneval.; did you mean .human-eval"
    ):
        check_sources(parse_config({**least, "bench": {"suites": {"he": {"dataset": "humaneval"}}}}))
