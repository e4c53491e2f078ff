"""What this machine computes with: device, dtype, threads. Torch is imported only when one of them is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def choose_device(name: str) -> str:
    """A torch device name; ``auto`` is cuda when there is one, else cpu."""
    import torch

    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def choose_dtype(name: str, device: str, *, many_rows: bool = False) -> torch.dtype:
    """The compute dtype; ``auto`` is bfloat16 where the machine multiplies it fast, else float32.

    That is CUDA and AMX, and AVX512-bf16 too where ``many_rows`` are multiplied together (capture, training): it is
    twice as fast as float32 there, and no match for Eyrie's own float32 product where answers grow token by token.
    """
    import torch

    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    units = ("amx_bf16", "avx512_bf16") if many_rows else ("amx_bf16",)
    has = torch.cpu.get_capabilities()
    fast = device.startswith("cuda") or any(has.get(unit, False) for unit in units)
    return torch.bfloat16 if fast else torch.float32


def name_of(dtype: torch.dtype) -> str:
    """Its name as configs and manifests have it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def use_threads(count: int) -> None:
    """Bound the CPU threads of torch and numba, so that jobs side by side do not fight for the cores."""
    import numba
    import torch

    torch.set_num_threads(count)
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
