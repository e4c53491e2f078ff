"""Wall and CPU time of a stage, for its ``.stats.json``."""

from __future__ import annotations

import os
import time


class Stopwatch:
    """Runs from its making.

    CPU seconds count every thread of this process and every child that has ended and been waited for.
    """

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), _cpu_seconds()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._wall

    @property
    def cpu_seconds(self) -> float:
        return _cpu_seconds() - self._cpu

    def figures(self) -> dict[str, float]:
        """``{"seconds": ..., "cpu_seconds": ...}``, to the millisecond."""
        return {"seconds": round(self.seconds, 3), "cpu_seconds": round(self.cpu_seconds, 3)}


def _cpu_seconds() -> float:
    children = os.times()
    return time.process_time() + children.children_user + children.children_system
