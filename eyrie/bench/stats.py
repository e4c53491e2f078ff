"""Figures of a benchmark, each with its definition; pure functions of traces."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from eyrie.speculate import Trace

WIRING_FAULT = 1.05
"""Below this acceptance length nothing is being drafted right: a fault of wiring, not a weak drafter."""


@dataclass(frozen=True)
class Spread:
    """Median of repeated measurements with the lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in vars(self).items()}


def pooled_acceptance_length(traces: Sequence[Trace]) -> float:
    """Tokens emitted over verifies, both summed over all requests (a chain of K drafts has the ceiling K + 1)."""
    verifies = sum(trace.verifies for trace in traces)
    return sum(sum(trace.emitted) for trace in traces) / verifies if verifies else 1.0


def survival(traces: Sequence[Trace], count: int) -> list[float]:
    """Share of verifies in which drafts 1 to i were all accepted, for i = 1..count."""
    accepted = [n for trace in traces for n in trace.accepted]
    return [sum(n >= i for n in accepted) / max(1, len(accepted)) for i in range(1, count + 1)]


def conditional(survivals: Sequence[float]) -> list[float]:
    """Share of drafts i accepted among verifies in which drafts before i were: survival[i] / survival[i - 1]."""
    before = [1.0, *survivals[:-1]]
    return [now / was if was else 0.0 for now, was in zip(survivals, before, strict=True)]


def tokens_per_second(traces: Sequence[Trace]) -> float:
    """Tokens after the first over the wall time after the prefill, pooled."""
    return sum(sum(trace.emitted) for trace in traces) / max(1e-9, sum(trace.seconds for trace in traces))


def seconds_per_verify(traces: Sequence[Trace]) -> float:
    return sum(trace.seconds for trace in traces) / max(1, sum(trace.verifies for trace in traces))


def verdict(acceptance_length: float, break_even: float, speedup: Spread, ngram_speedup: float) -> dict[str, object]:
    """Whether to deploy, and why, in a sentence."""
    measured = (
        f"acceptance length {acceptance_length:.2f} against a break-even of {break_even:.2f}, "
        f"{speedup.median:.2f} times plain decoding ({speedup.low:.2f} to {speedup.high:.2f})"
    )
    if acceptance_length < WIRING_FAULT:
        return {
            "deploy": False,
            "sentence": f"Wiring fault: acceptance length {acceptance_length:.2f} means that no draft is accepted; "
            "check layer ids, key names and the draft vocabulary before training longer.",
        }
    if speedup.low <= 1.0:
        return {"deploy": False, "sentence": f"Do not deploy: {measured}; it does not pay on this machine."}
    if ngram_speedup >= speedup.median:
        return {
            "deploy": False,
            "sentence": f"Do not deploy: {measured}, but prompt lookup gives {ngram_speedup:.2f} times for nothing.",
        }
    return {"deploy": True, "sentence": f"Deploy: {measured}."}
