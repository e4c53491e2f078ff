"""Readings of this machine. Taking them changes nothing and, trials apart, takes well under half a second."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from eyrie.config import Config
from eyrie.doctor.collective import try_all_reduce
from eyrie.doctor.nvml import see, visible_here
from eyrie.doctor.processes import Family
from eyrie.doctor.readings import Disk, Host, Readings, RunFacts, Trial
from eyrie.engines.hire import KEYS
from eyrie.servers.sglang import available_bytes, preset_of

PREFIXES = ("NCCL_", "CUDA_", "SGLANG_", "HF_HUB_")
PACKAGES = ("eyrie", "snakemake", "torch", "transformers", "nvidia-ml-py")
CONNECT_S = 0.3
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # of the machine itself; the kernel numbers those of containers otherwise


def take_readings(config: Config, run_dir: Path, run: RunFacts) -> Readings:
    """Everything but trials.

    Args:
        run_dir: ``results/<run>``; what a run writes lies on its file system.
        run: facts of the run's files.
    """
    seen = see(Family())
    return Readings(
        host=_host(),
        disks=tuple(_disks([run_dir, Path(config.target.model)])),
        driver=seen.driver,
        gpus=tuple(seen.gpus),
        gpus_unreadable=seen.unreadable,
        driver_broken=seen.broken,
        visible=visible_here(seen),
        links=tuple(seen.links),
        environment=_environment(),
        versions={name: text for name in PACKAGES if (text := _version(name))},
        reached=_reached(config.engine.urls),
        run=run,
    )


def take_trials(readings: Readings, config: Config) -> Readings:
    """The same with an all-reduce over the server's GPUs, and where that fails one through host memory."""
    from eyrie.doctor.finding import server_gpus

    gpus = server_gpus(readings, config)
    if len(gpus) < 2:
        return readings
    own = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    own |= {name: str(value) for name, value in preset_of(config.server.preset)["environment"].items()}
    trials: list[Trial] = [try_all_reduce("nccl", len(gpus), own)]
    if trials[0].seconds is None:
        trials.append(try_all_reduce("nccl", len(gpus), {**own, "NCCL_P2P_DISABLE": "1"}))
    return readings.model_copy(update={"trials": tuple(trials)})


def _host() -> Host:
    flags = Path("/proc/cmdline")
    shared = Path("/dev/shm")
    return Host(
        cores=os.cpu_count() or 1,
        available=available_bytes(),
        swap=psutil.swap_memory().total,
        shared=shutil.disk_usage(shared).free if shared.is_dir() else None,
        open_files=_open_files(),
        sees_all=_in_first_namespace(),
        kernel_flags=tuple(flags.read_text().split()) if flags.is_file() else (),
        clock=datetime.now(UTC),
    )


def _open_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft


def _in_first_namespace() -> bool:
    try:
        return str(Path("/proc/self/ns/pid").readlink()) == f"pid:[{FIRST_PID_NAMESPACE}]"
    except OSError:
        return True


def _disks(paths: list[Path]) -> list[Disk]:
    """The file systems under ``paths``, each once; a path that is not there yet counts as its nearest parent."""
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    found: dict[int, Disk] = {}
    for path in paths:
        place = path.resolve()
        while not place.exists():
            place = place.parent
        usage = shutil.disk_usage(place)
        kind = next((mounts[str(up)] for up in (place, *place.parents) if str(up) in mounts), "?")
        found.setdefault(place.stat().st_dev, Disk(path=str(path), free=usage.free, total=usage.total, kind=kind))
    return list(found.values())


def _environment() -> dict[str, str]:
    """Variables that a check reads. Of keys only that they are set."""
    secret = {name: "set" for name in KEYS.values() if os.environ.get(name)}
    plain = {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}
    return {name: "set" if name.endswith(("KEY", "TOKEN")) else value for name, value in sorted(plain.items())} | secret


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _reached(urls: tuple[str, ...]) -> dict[str, bool]:
    if not urls:
        return {}
    with ThreadPoolExecutor(min(32, len(urls))) as pool:
        return dict(zip(urls, pool.map(_listens, urls), strict=True))


def _listens(url: str) -> bool:
    parts = urlsplit(url)
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return True
