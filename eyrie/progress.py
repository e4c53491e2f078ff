"""Progress of a long stage: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

import rich.progress
from rich.console import Console

Fact = str | int | float


class Progress:
    """Shows how much of ``total`` is done, the rate, the time left and a few facts.

    Args:
        label: what is being done, such as ``generate code/s0000``.
        total: how much there is to do, in ``unit``.
        unit: plural noun, such as ``tokens``.
        done: what was there before the start (a resumed job); it is shown but is no part of the rate.
        stream: where to show it; standard error by default.
        interval: seconds between two plain lines.
        clock: monotonic seconds.
        pace: gives the text for rate and time left, of a stage that knows better (True: at the end); default: the mean
            rate, and what is left at that rate.
    """

    def __init__(
        self,
        label: str,
        total: int,
        unit: str,
        *,
        done: int = 0,
        stream: TextIO | None = None,
        interval: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        pace: Callable[[bool], str] | None = None,
    ) -> None:
        self._pace = pace
        self.label, self.total, self.unit, self.done = label, total, unit, done
        self._facts: dict[str, Fact] = {}
        self._stream, self._interval, self._clock = stream or sys.stderr, interval, clock
        self._first = done
        self._start = self._shown = clock()
        self._bar = self._make_bar() if self._stream.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def advance(self, n: int = 1, **facts: Fact) -> None:
        """Book ``n`` more units; ``facts`` replace the ones of the same name and stay shown."""
        self.done += n
        self._facts.update(facts)
        if self._bar:
            self._bar.update(self._task, completed=min(self.done, self.total), text=self._tail())
        elif self._clock() - self._shown >= self._interval:
            self._shown = self._clock()
            percent = 100 * min(self.done, self.total) // max(self.total, 1)
            self._print(f"{self.done:,} of {self.total:,} {self.unit} ({percent}%), {self._tail()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
        ending = "stopped at" if kind else "done:"
        took = duration(self._clock() - self._start)
        self._print(f"{ending} {self.done:,} {self.unit} after {took}, {self._tail(left=False)}")

    def _tail(self, left: bool = True) -> str:
        """Rate, time left and facts, such as ``210 tokens/s, 3 min 05 s left, rows 51``."""
        parts = [self._pace(not left) if self._pace else self._mean_pace(left)]
        parts += [f"{name} {_number(value)}" for name, value in self._facts.items()]
        return ", ".join(parts)

    def _mean_pace(self, left: bool) -> str:
        elapsed = self._clock() - self._start
        mean = (self.done - self._first) / elapsed if elapsed > 0 else 0.0
        more = left and mean > 0 and self.done < self.total
        return rate(mean, self.unit) + (f", {duration((self.total - self.done) / mean)} left" if more else "")

    def _print(self, text: str) -> None:
        print(f"{self.label}: {text}", file=self._stream, flush=True)

    def _make_bar(self) -> rich.progress.Progress:
        bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} " + self.unit),
            rich.progress.TextColumn("{task.fields[text]}"),
            console=Console(file=self._stream),
            transient=True,
        )
        self._task = bar.add_task(self.label, total=self.total, completed=min(self.done, self.total), text="")
        return bar


def duration(seconds: float) -> str:
    """``42 s``, ``3 min 05 s``, ``2 h 07 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def span(low: float, high: float) -> str:
    """``3 min 05 s to 2 h 07 min``; one duration where both ends read the same."""
    ends = duration(low), duration(high)
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def rate(speed: float, unit: str) -> str:
    """``1,210 tokens/s``, ``0.25 steps/s``."""
    return f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:.2g} {unit}/s"


def _number(value: Fact) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
