from __future__ import annotations

import io
import time

import pytest

from eyrie.progress import Progress, duration
from eyrie.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("generate code/s0000", 20_000, "tokens", stream=stream, clock=clock) as progress:
        for step in range(100):
            clock.now += 0.1
            progress.advance(100, truncated=step // 10)
    lines = stream.getvalue().splitlines()
    assert lines == [
        "generate code/s0000: 5,000 of 20,000 tokens (25%), 1,000 tokens/s, 15 s left, truncated 4",
        "generate code/s0000: done: 10,000 tokens after 10 s, 1,000 tokens/s, truncated 9",
    ] or lines == [
        "generate code/s0000: 5,100 of 20,000 tokens (25%), 1,000 tokens/s, 15 s left, truncated 5",
        "generate code/s0000: done: 10,000 tokens after 10 s, 1,000 tokens/s, truncated 9",
    ]


def test_what_was_done_before_is_no_part_of_the_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("train", 1000, "steps", done=900, stream=stream, interval=0, clock=clock) as progress:
        clock.now += 10
        progress.advance(50, loss=1.23456)
    assert stream.getvalue().splitlines()[0] == "train: 950 of 1,000 steps (95%), 5 steps/s, 10 s left, loss 1.235"


def test_overshoot_and_empty_totals_are_shown_calmly() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("a", 10, "rows", stream=stream, interval=0, clock=clock) as progress:
        progress.advance(25)
    with Progress("b", 0, "rows", stream=stream, interval=0, clock=clock) as progress:
        progress.advance(0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "a: 25 of 10 rows (100%), 0 rows/s"
    assert lines[2].startswith("b: 0 of 0 rows")


def test_a_failed_stage_says_where_it_stopped() -> None:
    stream = io.StringIO()
    progress = Progress("capture", 10, "rows", stream=stream, clock=Clock())
    with pytest.raises(ZeroDivisionError), progress:
        progress.advance(3 // (len(stream.getvalue())))
    assert stream.getvalue() == "capture: stopped at 0 rows after 0 s, 0 rows/s\n"


def test_a_terminal_gets_a_bar_and_one_last_line() -> None:
    stream = Terminal()
    with Progress("merge", 4, "shards", stream=stream) as progress:
        progress.advance(4, kept=17)
    text = stream.getvalue()
    assert "4 of 4 shards" in text
    assert "━" in text
    assert "merge: done: 4 shards after 0 s" in text.splitlines()[-1]
    assert text.endswith("kept 17\n")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_stopwatch_counts_work_and_not_sleep() -> None:
    watch = Stopwatch()
    time.sleep(0.05)
    while watch.cpu_seconds < 0.02:
        sum(range(1000))
    figures = watch.figures()
    assert figures["seconds"] >= 0.05
    assert 0.02 <= figures["cpu_seconds"] < figures["seconds"]
