"""GPUs as NVML sees them. Every reading that a device or a container refuses is left out, never guessed."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from eyrie.doctor.processes import Family, holder
from eyrie.doctor.readings import Gpu, Link

T = TypeVar("T")
PEER_READ, PEER_NVLINK = 0, 2
"""NVML_P2P_CAPS_INDEX_READ and _NVLINK; the package holds the first as a tuple, which its own functions refuse."""
BROKEN = {9, 15, 16, 18}
"""NVML's numbers for: driver not loaded, GPU lost, reset required, driver and library of two versions. CUDA fails too;
any other silence (a container without the library) says nothing about CUDA."""


@dataclass
class Seen:
    """What NVML said."""

    driver: str = ""
    gpus: list[Gpu] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    unreadable: str = ""
    broken: bool = False
    uuids: list[str] = field(default_factory=list)


def read_gpus(nvml: Any, family: Family) -> Seen:
    """All devices and how they reach each other.

    Args:
        nvml: the module ``pynvml``, or a recording with its functions.
        family: which processes belong to this workflow.
    """
    nvml.nvmlInit()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return Seen(
            driver=_text(nvml.nvmlSystemGetDriverVersion()),
            gpus=[_gpu(nvml, index, handle, family) for index, handle in enumerate(handles)],
            links=_links(nvml, handles),
            uuids=[_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles],
        )
    finally:
        nvml.nvmlShutdown()


def see(family: Family, device_files: Path = Path("/dev")) -> Seen:
    """The same from this machine; without a driver nothing, and where one should answer and does not, why."""
    expected = (device_files / "nvidiactl").exists() or (device_files / "dxg").exists()
    try:
        import pynvml
    except ImportError:
        return Seen(unreadable="the package nvidia-ml-py is not installed" if expected else "")
    try:
        return read_gpus(pynvml, family)
    except pynvml.NVMLError as error:
        return Seen(unreadable=str(error) if expected else "", broken=expected and error.value in BROKEN)


def visible(seen: Seen, value: str | None) -> tuple[int, ...]:
    """NVML indices that ``CUDA_VISIBLE_DEVICES`` allows, in its order; an unknown name ends the list, as in CUDA."""
    if value is None:
        return tuple(gpu.index for gpu in seen.gpus)
    chosen: list[int] = []
    for name in (part.strip() for part in value.split(",")):
        index = int(name) if name.isdigit() else next((n for n, id in enumerate(seen.uuids) if id.startswith(name)), -1)
        if not name or not 0 <= index < len(seen.gpus):
            break
        chosen.append(index)
    return tuple(chosen)


def _gpu(nvml: Any, index: int, handle: Any, family: Family) -> Gpu:
    memory = _memory(nvml, handle)
    listed = _known(nvml, lambda: _processes(nvml, handle), None)
    nothing: tuple[str, ...] = ()
    major, minor = nvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        free=int(memory.free),
        used=int(memory.used),
        capability=(int(major), int(minor)),
        uncorrected=_known(
            nvml,
            lambda: int(
                nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
            None,
        ),
        throttled=_known(nvml, lambda: _throttled(nvml, handle), nothing),
        holders=tuple(holder(pid, amount, family) for pid, amount in (listed or {}).items()),
        holders_known=listed is not None and None not in listed.values(),
    )


def _memory(nvml: Any, handle: Any) -> Any:
    """Version 2 keeps apart what the driver reserves; old drivers count it as used."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetMemoryInfo(handle)


def _processes(nvml: Any, handle: Any) -> dict[int, int | None]:
    """Bytes by pid. A process that computes and draws is in both lists, with the same amount."""
    found: dict[int, int | None] = {}
    for list_ in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in list_(handle):
            amount = process.usedGpuMemory
            found[int(process.pid)] = None if amount is None else int(amount)
    return found


def _throttled(nvml: Any, handle: Any) -> tuple[str, ...]:
    mask = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    faults = {
        "heat": nvml.nvmlClocksThrottleReasonHwThermalSlowdown | nvml.nvmlClocksThrottleReasonSwThermalSlowdown,
        "power supply": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return tuple(name for name, bits in faults.items() if mask & bits)


def _links(nvml: Any, handles: Sequence[Any]) -> list[Link]:
    pairs = [(a, b) for a in range(len(handles)) for b in range(a + 1, len(handles))]
    return [Link(a=a, b=b, path=_path(nvml, handles[a], handles[b]), peer=_peer(nvml, handles[a], handles[b]))
            for a, b in pairs]  # fmt: skip


def _path(nvml: Any, a: Any, b: Any) -> Literal["NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS"]:
    ok = nvml.NVML_P2P_STATUS_OK
    if _known(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(a, b, PEER_NVLINK) == ok, False):
        return "NVLINK"
    level = _known(nvml, lambda: nvml.nvmlDeviceGetTopologyCommonAncestor(a, b), nvml.NVML_TOPOLOGY_SYSTEM)
    names: dict[int, Literal["PIX", "PXB", "PHB", "NODE"]] = {
        nvml.NVML_TOPOLOGY_INTERNAL: "PIX",
        nvml.NVML_TOPOLOGY_SINGLE: "PIX",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
        nvml.NVML_TOPOLOGY_NODE: "NODE",
    }
    return names.get(level, "SYS")


def _peer(nvml: Any, a: Any, b: Any) -> bool:
    status = _known(nvml, lambda: nvml.nvmlDeviceGetP2PStatus(a, b, PEER_READ), None)
    return bool(status == nvml.NVML_P2P_STATUS_OK)


def _known(nvml: Any, read: Callable[[], T], otherwise: T) -> T:
    try:
        return read()
    except nvml.NVMLError:
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_here(seen: Seen) -> tuple[int, ...]:
    """What a job that is started from here may use."""
    return visible(seen, os.environ.get("CUDA_VISIBLE_DEVICES"))
