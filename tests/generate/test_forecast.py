"""The remaining time is a range that holds what comes, for long answers and for short ones."""

from __future__ import annotations

import heapq
import random

import pytest

from eyrie.generate.forecast import Ended, Pace, made, remaining


def played(lengths: list[int], slots: int, speed: float, budget: int, look: float) -> tuple[tuple[float, float], float]:
    """The range that is given when the share ``look`` of the budget is there, and how long it then took."""
    now = done = 0.0
    pace = Pace(lambda: now)
    running: list[tuple[float, int, int]] = []
    position, seen, looked_at = 0, None, 0.0
    while done < budget:
        while len(running) < slots and done + sum(length for _, _, length in running) < budget:
            pace.asked(position)
            heapq.heappush(running, (now + lengths[position] / speed, position, lengths[position]))
            position += 1
        now, ended, length = heapq.heappop(running)
        pace.ended(ended, length)
        done += length
        if seen is None and done >= look * budget:
            most = max(lengths)
            seen, looked_at = pace.remaining(budget - done - pace.made(most), most), now
    assert seen is not None
    return seen, now - looked_at


@pytest.mark.parametrize("mean", [700, 16_000])
@pytest.mark.parametrize("slots", [4, 64])
def test_the_range_holds_what_comes(mean: int, slots: int) -> None:
    draw, held = random.Random(5), 0
    for _ in range(20):
        lengths = [max(1, min(round(draw.expovariate(1 / mean)), 4 * mean)) for _ in range(3000)]
        (low, high), took = played(lengths, slots, speed=30.0, budget=300 * mean, look=draw.uniform(0.2, 0.9))
        assert low <= high
        held += low <= took <= high
    assert held >= 17


def test_long_answers_have_a_long_tail_where_short_ones_have_none() -> None:
    """The same tokens are missing at the same speed; what differs is how long the last answer takes."""
    short = remaining(64_000, [Ended(700, 7.0)] * 50, [1.0] * 8, 2_048)
    long = remaining(64_000, [Ended(16_000, 160.0)] * 50, [1.0] * 8, 16_384)
    assert short is not None
    assert long is not None
    assert long[1] - long[0] > 5 * (short[1] - short[0])


def test_the_range_narrows_as_answers_come() -> None:
    draw = random.Random(3)
    ended = [Ended(length, length / 30) for length in (draw.randint(100, 900) for _ in range(400))]
    few, many = remaining(10**6, ended[:5], [2.0] * 8, 1024), remaining(10**6, ended, [2.0] * 8, 1024)
    assert few is not None
    assert many is not None
    assert many[1] / many[0] < 1.3 < few[1] / few[0]


def test_nothing_is_said_before_anything_is_known() -> None:
    assert remaining(1000, [], [1.0, 2.0], 64) is None
    assert made([], [1.0], 64) == 0.0


def test_answers_in_flight_count_up_to_their_bound() -> None:
    assert made([Ended(100, 10.0)], [3.0, 1000.0], 64) == 30 + 64


def test_a_full_shard_needs_no_time() -> None:
    assert remaining(0, [Ended(100, 10.0)], [], 64) == (0.0, 0.0)


def test_turns_that_follow_take_their_time() -> None:
    one = remaining(0, [Ended(100, 10.0)] * 30, [1.0], 100)
    four = remaining(0, [Ended(100, 10.0)] * 30, [1.0], 100, turns=4)
    assert one is not None
    assert four is not None
    assert four[1] - one[1] > 3 * 9
