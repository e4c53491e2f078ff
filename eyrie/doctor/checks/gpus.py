"""GPUs: who holds their memory, whether they are well, and how they reach each other."""

from __future__ import annotations

from eyrie.config import Config
from eyrie.doctor.finding import (
    NO_GPU,
    NO_GPU_USED,
    Finding,
    does_not_apply,
    gib,
    green,
    red,
    server_gpus,
    serves_on_gpu,
    used_gpus,
    yellow,
)
from eyrie.doctor.readings import MIB, Gpu, Holder, Readings
from eyrie.servers.sglang import preset_of

SLACK = 500 * MIB
"""Memory that a desktop or a driver may hold."""
LARGE_SHARE = 0.1
"""Of a GPU's memory: from here on what nobody can be asked about is no oddity but missing."""
IOMMU_ON = ("intel_iommu=on", "amd_iommu=on", "iommu=on", "iommu.passthrough=0", "iommu.strict=1")
SHARED_NEEDED = 256 * MIB
"""Of /dev/shm per rank; a container's usual 64 MiB make NCCL fail at its first collective."""


def gpu_held(readings: Readings, config: Config) -> Finding:
    """Memory held by processes that this workflow did not start, such as workers of a dead server."""
    gpus = used_gpus(readings, config)
    if not gpus:
        return NO_GPU_USED if readings.gpus else NO_GPU
    strangers = [(gpu, holder) for gpu in gpus for holder in gpu.holders if not holder.ours]
    heavy = [(gpu, holder) for gpu, holder in strangers if (holder.bytes or 0) > SLACK]
    if heavy and not readings.host.sees_all and all(holder.state == "hidden" for _, holder in heavy):
        return yellow(
            "; ".join(_holder_text(gpu, holder) for gpu, holder in heavy),
            "in a container nobody can tell whose this is: look on the host if it is not a job or server of yours",
        )
    if heavy:
        return red(
            "; ".join(_holder_text(gpu, holder) for gpu, holder in heavy),
            f"{_ending(heavy[0][1])}; or choose other GPUs with CUDA_VISIBLE_DEVICES. Eyrie ends no process that it "
            "did not start",
        )
    ours = [(gpu, holder) for gpu in gpus for holder in gpu.holders if holder.ours and (holder.bytes or 0) > SLACK]
    if ours:
        return yellow(
            "; ".join(_holder_text(gpu, holder) for gpu, holder in ours),
            "started by Eyrie: a job that is running, or a server that ends by itself once no job uses it",
        )
    free = ", ".join(f"GPU {gpu.index}: {gib(gpu.free)} of {gib(gpu.total)} free" for gpu in gpus)
    return green(f"{free}; {len(strangers)} other processes with little memory")


def _holder_text(gpu: Gpu, holder: Holder) -> str:
    said = {"zombie": ", ended but not reaped", "hidden": ", not visible from here", "running": ""}[holder.state]
    orphaned = ", orphaned: whoever started it is gone" if holder.orphaned else ""
    held = f"{(holder.bytes or 0) // MIB:,} MiB"
    return f"GPU {gpu.index}: pid {holder.pid} ({holder.name}, user {holder.user}) holds {held}{said}{orphaned}"


def _ending(holder: Holder) -> str:
    if holder.state == "zombie":
        return f"end the parent of pid {holder.pid} (`ps -o ppid= -p {holder.pid}`), which never collected it"
    if holder.state == "hidden":
        return f"look for pid {holder.pid} on the host, outside this container"
    if holder.orphaned:
        return f"end it if nobody needs it: `kill {holder.pid}`"
    return f"wait until pid {holder.pid} is done, or ask its user"


def gpu_unseen(readings: Readings, config: Config) -> Finding:
    """Used memory that no listed process accounts for: another container, or one that died badly."""
    gpus = used_gpus(readings, config)
    if not gpus:
        return NO_GPU_USED if readings.gpus else NO_GPU
    gaps = {gpu: gpu.used - sum(holder.bytes or 0 for holder in gpu.holders) for gpu in gpus}
    open_ = {gpu: gap for gpu, gap in gaps.items() if gap > SLACK}
    text = ", ".join(f"GPU {gpu.index}: {gap // MIB:,} MiB" for gpu, gap in open_.items())
    if not open_:
        return green(f"at most {max(0, *gaps.values(), 0) // MIB:,} MiB belong to no listed process")
    mend = "look for its owner on the host and in other containers (`fuser -v /dev/nvidia*` as root)"
    if readings.host.sees_all and any(gap > LARGE_SHARE * gpu.total for gpu, gap in open_.items()):
        return red(f"memory of no listed process: {text}", mend)
    tells = readings.host.sees_all and all(gpu.holders_known for gpu in open_)
    blind = "" if tells else "; the driver does not say here who holds how much"
    return yellow(f"memory of no listed process: {text}{blind}", mend)


def gpu_health(readings: Readings, config: Config) -> Finding:
    """A driver that answers, memory without errors, clocks that nothing holds down."""
    if readings.gpus_unreadable:
        said = f"NVML gives no reading: {readings.gpus_unreadable}"
        if readings.driver_broken:
            return red(said, "`nvidia-smi` says more; after an update of the driver reboot, else reset the GPU")
        return yellow(said, "install envs/host.txt; in a container let the driver's utilities in")
    asked = [
        name
        for name, device in (("engine.device", config.engine.device), ("server.device", config.server.device))
        if device.startswith("cuda")
    ]
    if not readings.gpus:
        if asked:
            return red(f"{asked[0]} asks for a GPU and the driver shows none", f"set {asked[0]} to auto or cpu")
        return NO_GPU
    if asked and not readings.visible:
        return red(
            f"{asked[0]} asks for a GPU and CUDA_VISIBLE_DEVICES hides all of them", "unset CUDA_VISIBLE_DEVICES"
        )
    gpus = used_gpus(readings, config)
    if not gpus:
        return NO_GPU_USED
    wanted = config.server.tensor_parallel
    if serves_on_gpu(readings, config) and len(readings.visible) < wanted:
        return red(
            f"server.tensor_parallel is {wanted} and {len(readings.visible)} GPUs are visible",
            "lower server.tensor_parallel, or give more GPUs with CUDA_VISIBLE_DEVICES",
        )
    broken = [f"GPU {gpu.index}: {gpu.uncorrected} memory errors" for gpu in gpus if gpu.uncorrected]
    if broken:
        return red(
            f"ECC could not mend: {', '.join(broken)}",
            "reset or replace the GPU (`nvidia-smi -q -d ECC,ROW_REMAPPER`), or leave it out with CUDA_VISIBLE_DEVICES",
        )
    slow = [f"GPU {gpu.index}: {', '.join(gpu.throttled)}" for gpu in gpus if gpu.throttled]
    if slow:
        return yellow(f"clocks are held down: {'; '.join(slow)}", "look after cooling and power supply")
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    return green(f"{len(gpus)} of {len(readings.gpus)} GPUs are used ({names}), driver {readings.driver}")


def gpu_peers(readings: Readings, config: Config) -> Finding:
    """Whether collectives between the server's GPUs end: over PCIe they can hang although the driver calls it fine."""
    gpus = server_gpus(readings, config)
    if len(gpus) < 2:
        return does_not_apply("one GPU at most: nothing is sent between GPUs")
    shared, needed = readings.host.shared, SHARED_NEEDED * len(gpus)
    if shared is not None and shared < needed:
        return red(
            f"/dev/shm holds {shared // MIB:,} MiB for {len(gpus)} ranks",
            f"give it {needed // MIB:,} MiB (docker run --shm-size, or --ipc=host)",
        )
    paths = _paths(readings, {gpu.index for gpu in gpus})
    flags = [flag for flag in readings.host.kernel_flags if flag in IOMMU_ON or flag.startswith(("iommu=", "pci"))]
    where = f"{paths}; kernel flags: {' '.join(flags) or 'none that matter'}"
    off = {**preset_of(config.server.preset)["environment"]}.get("NCCL_P2P_DISABLE") == "1"
    if readings.trials:
        return _tried(readings, where)
    by_pcie = "NVLINK" not in paths or "SYS" in paths
    blocked = "iommu=pt" not in readings.host.kernel_flags and any(flag in IOMMU_ON for flag in flags)
    if by_pcie and not off and blocked:
        return yellow(
            f"{where}; no trial was run",
            "with the IOMMU on, peer-to-peer over PCIe can hang: make this page (it runs a trial), or take "
            "server.preset pcie-throughput, or boot with iommu=pt",
        )
    return green(f"{where}; peer-to-peer is {'off (server.preset)' if off else 'left to NCCL'}")


def _tried(readings: Readings, where: str) -> Finding:
    """The first trial has the server's own environment, the second goes through host memory."""
    own, *others = readings.trials
    if own.seconds is not None:
        return green(f"an all-reduce took {own.seconds:.1f} s; {where}")
    works = [trial for trial in others if trial.seconds is not None]
    evidence = f"an all-reduce as the server would do it did not end well ({own.said}); {where}"
    if works:
        return red(
            f"{evidence}; through host memory it took {works[0].seconds:.1f} s",
            "set server.preset to pcie-throughput, or switch ACS and the IOMMU off",
        )
    return red(
        f"{evidence}; neither did one through host memory", "`NCCL_DEBUG=INFO` says why; check driver and /dev/shm"
    )


def _paths(readings: Readings, indices: set[int]) -> str:
    links = [link for link in readings.links if {link.a, link.b} <= indices]
    counts: dict[str, int] = {}
    for link in links:
        counts[link.path] = counts.get(link.path, 0) + 1
    refused = sum(not link.peer for link in links)
    said = ", ".join(f"{count} x {path}" for path, count in counts.items()) or "topology unknown"
    return f"{said}{f', {refused} pairs without peer access' if refused else ''}"


def nccl_settings(readings: Readings, config: Config) -> Finding:
    """NCCL variables that contradict each other, the preset, or what the GPUs can do."""
    gpus = server_gpus(readings, config)
    if len(gpus) < 2:
        return does_not_apply("one GPU at most: NCCL has nothing to do")
    preset = {name: str(value) for name, value in preset_of(config.server.preset)["environment"].items()}
    shell = {name: value for name, value in readings.environment.items() if name.startswith("NCCL_")}
    chosen = {**shell, **preset}
    text = " ".join(f"{name}={value}" for name, value in sorted(chosen.items())) or "no NCCL variable is set"
    level, indices = chosen.get("NCCL_P2P_LEVEL", ""), {gpu.index for gpu in gpus}
    refused = [link for link in readings.links if {link.a, link.b} <= indices and not link.peer]
    if level in ("SYS", "PHB") and chosen.get("NCCL_P2P_DISABLE") != "1" and refused:
        return red(
            f"{text}, but {len(refused)} pairs of GPUs have no peer access",
            "this deadlocks (all GPUs busy, low power): take server.preset pcie-throughput, or unset NCCL_P2P_LEVEL",
        )
    if level and chosen.get("NCCL_P2P_DISABLE") == "1":
        return yellow(f"{text}: the level has no effect", "unset NCCL_P2P_LEVEL or NCCL_P2P_DISABLE")
    overruled = sorted(name for name in shell if name in preset and shell[name] != preset[name])
    if overruled:
        return yellow(
            f"{text}; {', '.join(overruled)} of the shell is overruled by server.preset",
            "unset it, so that the machine does what you read",
        )
    return green(text)
