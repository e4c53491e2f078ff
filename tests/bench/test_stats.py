"""Every figure on traces small enough to count by hand, and every branch of the verdict."""

from __future__ import annotations

import pytest

from eyrie.bench.stats import (
    WIRING_FAULT,
    Spread,
    conditional,
    pooled_acceptance_length,
    seconds_per_verify,
    survival,
    tokens_per_second,
    verdict,
)
from eyrie.speculate import Trace

# a first token from the prefill, then verifies with 3 drafts each
ONE = Trace(output_ids=list(range(8)), drafted=[3, 3, 3], accepted=[3, 0, 1], emitted=[4, 1, 2], seconds=0.5)
# the stop token was the first of two accepted drafts: accepted says 2, emitted 1
TWO = Trace(output_ids=[7, 2], drafted=[3], accepted=[2], emitted=[1], seconds=0.25)
# the prefill's token was the stop token
NONE = Trace(output_ids=[2])


def test_acceptance_length_of_a_request() -> None:
    assert ONE.verifies == 3
    assert ONE.acceptance_length == pytest.approx(7 / 3)
    assert TWO.acceptance_length == 1.0
    assert NONE.acceptance_length == 1.0


def test_acceptance_length_is_pooled_over_verifies_not_averaged_over_requests() -> None:
    assert pooled_acceptance_length([ONE, TWO, NONE]) == pytest.approx(8 / 4)
    assert pooled_acceptance_length([ONE, TWO]) != pytest.approx((7 / 3 + 1) / 2)
    assert pooled_acceptance_length([NONE]) == 1.0
    assert pooled_acceptance_length([]) == 1.0


def test_survival_and_conditional() -> None:
    found = survival([ONE, TWO, NONE], 3)
    assert found == [3 / 4, 2 / 4, 1 / 4]
    assert conditional(found) == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]
    assert survival([NONE], 2) == [0.0, 0.0]


def test_speed_leaves_the_prefill_s_token_out() -> None:
    assert tokens_per_second([ONE, TWO]) == pytest.approx(8 / 0.75)
    assert seconds_per_verify([ONE, TWO]) == pytest.approx(0.75 / 4)
    assert tokens_per_second([NONE]) == 0.0
    assert seconds_per_verify([NONE]) == 0.0


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
    assert Spread.of([1.0, 2.0]) == Spread(1.5, 1.0, 2.0)
    assert Spread(1.23456, 1.0, 2.0).to_json() == {"median": 1.235, "low": 1.0, "high": 2.0}


@pytest.mark.parametrize(
    ("acceptance", "speedup", "ngram", "deploy", "opening"),
    [
        (2.1, Spread(1.4, 1.3, 1.5), 1.1, True, "Deploy: "),
        (2.1, Spread(1.4, 0.99, 1.5), 1.1, False, "Do not deploy: "),  # even its slowest round must win
        (2.1, Spread(1.4, 1.0, 1.5), 1.1, False, "Do not deploy: "),
        (2.1, Spread(1.4, 1.3, 1.5), 1.4, False, "Do not deploy: "),  # prompt lookup needs no training
        (2.1, Spread(1.4, 1.3, 1.5), 1.6, False, "Do not deploy: "),
        (1.04, Spread(1.4, 1.3, 1.5), 1.1, False, "Wiring fault: "),
        (1.0, Spread(0.5, 0.5, 0.5), 1.1, False, "Wiring fault: "),
        (WIRING_FAULT, Spread(1.01, 1.005, 1.02), 1.0, True, "Deploy: "),
    ],
)
def test_verdict(acceptance: float, speedup: Spread, ngram: float, deploy: bool, opening: str) -> None:
    found = verdict(acceptance, 1.5, speedup, ngram)
    assert found["deploy"] is deploy
    sentence = str(found["sentence"])
    assert sentence.startswith(opening)
    assert sentence.endswith(".")
    assert f"{acceptance:.2f}" in sentence


def test_the_reasons_differ() -> None:
    slow = verdict(2.0, 2.5, Spread(0.8, 0.7, 0.9), 0.5)["sentence"]
    beaten = verdict(2.0, 1.5, Spread(1.2, 1.1, 1.3), 1.25)["sentence"]
    assert "does not pay on this machine" in str(slow)
    assert "break-even of 2.50" in str(slow)
    assert "prompt lookup gives 1.25 times" in str(beaten)
