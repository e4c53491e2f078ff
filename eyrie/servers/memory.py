"""Device memory around a server's life: read before it starts, watched after it stopped until it is back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from eyrie.servers.process import wait_for

SLACK_BYTES = 512 << 20
"""What a driver may keep or another program may take between the two readings."""

Reader = Callable[[Sequence[int]], Mapping[int, int]]


def used_bytes(gpus: Sequence[int]) -> dict[int, int]:
    """Used memory by device index, through NVML; empty when no device is asked for or NVML is not there."""
    if not gpus:
        return {}
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # no driver, no library: whatever it raises, there is nothing to read
        return {}
    try:
        return {gpu: int(nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(gpu)).used) for gpu in gpus}
    finally:
        nvml.nvmlShutdown()


def not_returned(before: Mapping[int, int], now: Mapping[int, int]) -> dict[int, int]:
    """Bytes by device that are still held beyond ``before`` and the slack."""
    return {
        gpu: now[gpu] - used for gpu, used in before.items() if gpu in now and now[gpu] > used + SLACK_BYTES
    }  # fmt: skip


def wait_until_returned(before: Mapping[int, int], seconds: float, read: Reader = used_bytes) -> str:
    """Wait until every device is back at ``before``; empty, or a sentence about the memory that is still held."""
    gpus = tuple(before)
    if wait_for(lambda: not not_returned(before, read(gpus)), seconds, every=0.5):
        return ""
    held = ", ".join(f"GPU {gpu}: {amount >> 20} MiB" for gpu, amount in not_returned(before, read(gpus)).items())
    return f"device memory did not come back within {seconds:.0f} s of the server's end ({held})" if held else ""
