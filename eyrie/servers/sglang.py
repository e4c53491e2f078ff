"""How SGLang is started: every argument follows from the config, the model and the drafter."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from eyrie.config import Server
from eyrie.errors import EyrieError
from eyrie.servers.flags import check_arguments, sglang_version
from eyrie.servers.spec import Spec

CPU_POOL_TOKENS = 16_384
"""Key-value tokens on a CPU when the config names none: it has no device memory to fill."""

CPU_ARGUMENTS = {
    "device": "cpu",
    # given apart: the single --attention-backend is rewritten to one that cannot draft
    "prefill-attention-backend": "intel_amx",
    "decode-attention-backend": "intel_amx",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "disable-overlap-schedule": True,
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "mem-fraction-static": 0.3,
}

GIB = 1 << 30
RESERVE_GIB = 10
"""Host memory that the hierarchical cache must leave."""
COMPILER_GIB = 5
"""Host memory that one compilation of a CUDA kernel takes."""


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding with a drafter of ours.

    Attributes:
        algorithm: SGLang's name; an EAGLE-3 drafter must be served as ``EAGLE3``.
        draft: exported folder.
        steps: draft steps per verify.
        topk: candidates per step; 1 is a chain.
        draft_tokens: tokens per verify, the root included; ``steps + 1`` for a chain.
    """

    draft: Path
    steps: int
    topk: int = 1
    draft_tokens: int = 0
    algorithm: str = "EAGLE3"

    def arguments(self) -> dict[str, Any]:
        """SGLang's arguments. Raises :class:`EyrieError` when they do not fit the drafter."""
        self.check()
        return {
            "speculative-algorithm": self.algorithm,
            "speculative-draft-model-path": str(self.draft.resolve()),
            "speculative-num-steps": self.steps,
            "speculative-eagle-topk": self.topk,
            "speculative-num-draft-tokens": self.draft_tokens or self.steps + 1,
        }

    def check(self) -> None:
        """Refuse what SGLang would take silently. Raises :class:`EyrieError`."""
        path = self.draft / "config.json"
        try:
            architectures = json.loads(path.read_text()).get("architectures") or []
        except (OSError, ValueError) as error:
            raise EyrieError(f"{path}: cannot be read ({error}); export the drafter again") from None
        is_eagle3 = any("eagle3" in str(name).lower() for name in architectures)
        if is_eagle3 and self.algorithm != "EAGLE3":
            raise EyrieError(
                f"{path}: {architectures[0]} is an EAGLE-3 drafter, which SGLang must serve with the algorithm EAGLE3; "
                f"with {self.algorithm} it would start without a warning and accept no draft"
            )
        if self.algorithm == "EAGLE3" and not is_eagle3:
            raise EyrieError(f"{path}: {architectures} is no EAGLE-3 drafter; it cannot be served as EAGLE3")
        if self.topk == 1 and self.draft_tokens not in (0, self.steps + 1):
            raise EyrieError(
                f"a chain of {self.steps} steps has {self.steps + 1} draft tokens, not {self.draft_tokens}"
            )
        faked = sorted(name for name in os.environ if name.startswith("SGLANG_SIMULATE_ACC"))
        if faked:
            raise EyrieError(f"{faked[0]}: is set and would fake the acceptance; unset it")


def sglang_spec(
    server: Server,
    *,
    model: Path | str,
    dtype: str,
    threads: int,
    speculation: Speculation | None = None,
    context_length: int | None = None,
    prefix_cache: bool = True,
    trust_remote_code: bool = False,
    probe_ids: tuple[int, ...] = (1,),
) -> Spec:
    """The server that the config describes, checked against the SGLang that is installed.

    Args:
        model: local folder or hub id.
        dtype: ``float32``, ``bfloat16`` or ``auto``.
        threads: CPU threads of each process.
        context_length: longest request that will come, where the config does not say.
        prefix_cache: False computes every prompt afresh, whatever came before.

    Raises:
        EyrieError: no SGLang at ``server.python``, an argument that it does not know, a preset that does not exist,
            a host cache beyond the host's memory, a drafter served under the wrong algorithm.
    """
    device, is_local = choose_server_device(server), Path(model).is_dir()
    python = server_python(server)
    preset = preset_of(server.preset)
    for name in server.flags:
        if name.startswith("speculative"):
            raise EyrieError(f"server.flags: {name!r} is set from the drafter when one is served; leave it out")
    pool = server.pool_tokens or (CPU_POOL_TOKENS if device == "cpu" else None)
    chosen: dict[str, Any] = {
        "model-path": str(Path(model).resolve() if is_local else model),
        "served-model-name": "{name}",
        "host": "127.0.0.1",
        "port": "{port}",
        "nccl-port": "{nccl_port}",
        "dtype": dtype,
        "max-running-requests": server.max_running_requests,
        "context-length": server.context_length or context_length,
        "trust-remote-code": trust_remote_code,
        "sleep-on-idle": True,
        "disable-radix-cache": not prefix_cache,
        "tensor-parallel-size": server.tensor_parallel,
        "mem-fraction-static": server.memory_fraction,
        "kv-cache-dtype": "fp8_e4m3" if server.kv_cache == "fp8" else "auto",
    }
    if device == "cpu":
        chosen |= {**CPU_ARGUMENTS, "max-total-tokens": pool}
        if server.memory_fraction is not None:
            chosen["mem-fraction-static"] = server.memory_fraction
    if server.host_cache_gb:
        check_host_cache(server.host_cache_gb, server.tensor_parallel, available_bytes())
        chosen |= {"enable-hierarchical-cache": True, "hicache-size": server.host_cache_gb}
    if speculation is not None:
        chosen |= speculation.arguments()
    arguments = [*_as_arguments(chosen), *_as_arguments(preset["flags"]), *_as_arguments(server.flags, split=True)]
    check_arguments(arguments, sglang_version(python))
    return Spec(
        command=(str(Path(python).absolute()), "-m", "sglang.launch_server", *arguments),
        environment={**_environment(server, device, threads, is_local), **preset["environment"]},
        probe_ids=probe_ids,
        planned_pool_tokens=pool,
        start_timeout_s=server.start_timeout_s,
        idle_s=server.idle_s,
        gpus=_gpus(server.tensor_parallel) if device == "cuda" else (),
    )


def server_python(server: Server) -> str:
    """The interpreter that ``server.python`` names, looked up in PATH."""
    return shutil.which(server.python) or server.python


def choose_server_device(server: Server) -> str:
    """``cpu`` or ``cuda``; auto is cuda when a driver with a device is there."""
    if server.device != "auto":
        return server.device
    return "cuda" if Path("/proc/driver/nvidia/gpus").is_dir() or Path("/dev/nvidia0").exists() else "cpu"


def _gpus(count: int) -> tuple[int, ...]:
    """Indices of the devices that the server will use: the first ``count`` of those that are visible."""
    visible = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(part.isdigit() for part in visible):
        return tuple(map(int, visible[:count]))
    return tuple(range(count))


def check_host_cache(gb_per_gpu: int, gpus: int, available: int) -> None:
    """Every rank pins its share in host memory, and some must be left. Raises :class:`EyrieError`."""
    wanted = gb_per_gpu * gpus * 10**9
    if wanted + RESERVE_GIB * GIB > available:
        most = max(0, (available - RESERVE_GIB * GIB) // (gpus * 10**9))
        raise EyrieError(
            f"server.host_cache_gb: {gb_per_gpu} GB for each of {gpus} GPUs leave under {RESERVE_GIB} GiB of the "
            f"{available / GIB:.0f} GiB that are free on this host; {most} would fit"
        )


def build_jobs(cores: int, available: int, swap: int) -> int:
    """Compilations at once that memory allows; without swap, one too many is killed and takes the server with it.

    Args:
        available, swap: bytes of free host memory and of swap.
    """
    share = 0.7 if swap == 0 else 0.9
    return max(1, min(cores // 2, int(available * share / (COMPILER_GIB * GIB)), 20))


def available_bytes() -> int:
    """Host memory that can be had now: the kernel's estimate, or what is left of the container's limit."""
    available = _meminfo().get("MemAvailable", 0)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    try:
        return min(available, int(limit.read_text()) - int(used.read_text()))
    except (OSError, ValueError):  # no container, or "max"
        return available


def _meminfo() -> dict[str, int]:
    rows = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) > 1}


def _environment(server: Server, device: str, threads: int, is_local: bool) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
    if is_local:
        environment["HF_HUB_OFFLINE"] = "1"
    if device == "cpu":
        return environment | {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    swap = _meminfo().get("SwapTotal", 0)
    jobs = server.build_jobs or build_jobs(os.cpu_count() or 1, available_bytes(), swap)
    return environment | {"MAX_JOBS": str(jobs), "NVCC_THREADS": "1"}


def _as_arguments(values: Mapping[str, Any], *, split: bool = False) -> list[str]:
    """``{"dtype": "auto", "trust-remote-code": True}`` as an argument vector; None and False are left out.

    Args:
        split: a text holds several values, separated by spaces.
    """
    arguments: list[str] = []
    for name, value in values.items():
        if value is None or value is False:
            continue
        texts = [] if value is True else str(value).split() if split else [str(value)]
        arguments += [f"--{name.removeprefix('--')}", *texts]
    return arguments


@cache
def _presets() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text()))


def preset_of(name: str | None) -> dict[str, Any]:
    """``environment`` and ``flags`` of a preset, empty without one. Raises :class:`EyrieError` when there is none."""
    if name is None:
        return {"environment": {}, "flags": {}}
    if name not in _presets():
        raise EyrieError(f"server.preset: there is no {name!r}; choose one of {', '.join(_presets())}")
    return _presets()[name]
