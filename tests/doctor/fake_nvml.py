"""NVML as it answered on a machine with two GPUs, with the functions and numbers of nvml.h."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

MIB = 1 << 20


class NVMLError(Exception):
    pass


@dataclass
class FakeNvml:
    """Device 0 has a process of each kind; device 1 is in another container and tells little."""

    listed: dict[int, list[tuple[int, int | None]]] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    open: int = 0

    NVMLError = NVMLError
    nvmlMemory_v2 = 0x2000028
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80
    NVML_P2P_STATUS_OK = 0
    NVML_TOPOLOGY_INTERNAL = 0
    NVML_TOPOLOGY_SINGLE = 10
    NVML_TOPOLOGY_MULTIPLE = 20
    NVML_TOPOLOGY_HOSTBRIDGE = 30
    NVML_TOPOLOGY_NODE = 40
    NVML_TOPOLOGY_SYSTEM = 50

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's names)
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "590.48.01"

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}f5c0b1e-0000-1111-2222-333344445555"

    def nvmlDeviceGetName(self, handle: int) -> bytes:  # noqa: N802
        return b"NVIDIA RTX PRO 6000 Blackwell Server Edition"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:  # noqa: N802
        return [12, 0]

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:  # noqa: N802
        self._may("memory" if version else "")
        reserved = 634 * MIB
        used = sum(amount or 0 for _, amount in self.listed.get(handle, []))
        shown = used if version else used + reserved
        return SimpleNamespace(total=97887 * MIB, free=97887 * MIB - reserved - used, used=shown)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:  # noqa: N802
        self._may("ecc")
        assert (kind, counter) == (1, 0), "uncorrected, since the driver was loaded"
        return handle

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        self._may("clocks")
        return 0x44 if handle else 0x4  # 0x4 is the power cap, which is no fault

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        self._may("processes")
        return [SimpleNamespace(pid=pid, usedGpuMemory=amount) for pid, amount in self.listed.get(handle, [])]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return self.nvmlDeviceGetComputeRunningProcesses(handle)[:1]

    def nvmlDeviceGetTopologyCommonAncestor(self, a: int, b: int) -> int:  # noqa: N802
        self._may("topology")
        return 30

    def nvmlDeviceGetP2PStatus(self, a: int, b: int, index: int) -> int:  # noqa: N802
        self._may("peers")
        return {0: 0, 2: 5}[index]  # read: fine, NVLink: not supported

    def _may(self, what: str) -> None:
        if what in self.refuses:
            raise NVMLError("Not Supported")
