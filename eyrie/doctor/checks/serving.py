"""The server that Eyrie starts: backends, memory, and what its host must give."""

from __future__ import annotations

from eyrie.config import Config
from eyrie.doctor.finding import (
    NO_GPU_SERVER,
    Finding,
    does_not_apply,
    gib,
    green,
    red,
    server_gpus,
    serves_on_gpu,
    yellow,
)
from eyrie.doctor.readings import GIB, Readings
from eyrie.errors import EyrieError
from eyrie.servers.sglang import COMPILER_GIB, build_jobs, check_host_cache

BACKEND_FLAGS = ("attention-backend", "prefill-attention-backend", "decode-attention-backend")
# attention backends whose kernels exist for some generations of GPUs alone: name -> major compute capabilities
BACKEND_NEEDS = {"trtllm_mla": (10,), "trtllm_mha": (10,), "cutlass_mla": (10,), "fa3": (8, 9)}

RUNTIME_GIB = 5.77
"""What graphs and workspaces took beside weights and pool: measured once, eight GPUs of 96 GB, a model of 1T."""
WANTED_GIB, LEAST_GIB = 5.0, 2.0
"""Device memory that a long prefill wants beside all that, and under which it fails."""
OFFERED_SHARE = 0.9
"""Of the planned pool; under it the supervisor refuses the server."""


def attention_backend(readings: Readings, config: Config) -> Finding:
    """Attention kernels that these GPUs do not have; some would start and hang at the first token."""
    gpus = server_gpus(readings, config)
    if not gpus:
        return NO_GPU_SERVER
    major, minor = min(gpu.capability for gpu in gpus)
    chosen = {name: str(config.server.flags[name]) for name in BACKEND_FLAGS if name in config.server.flags}
    for name, backend in chosen.items():
        if major not in BACKEND_NEEDS.get(backend, (major,)):
            return red(
                f"server.flags.{name} is {backend}, which has no kernels for compute capability {major}.{minor} "
                f"({gpus[0].name})",
                f"leave {name} out, or take flashinfer or triton",
            )
    said = ", ".join(f"{name} {backend}" for name, backend in chosen.items()) or "SGLang chooses the backend"
    return green(f"{said}, compute capability {major}.{minor}; a server must generate before it is used")


def fp8_cache(readings: Readings, config: Config) -> Finding:
    """An 8-bit key-value cache: it may change answers."""
    if config.server.kv_cache != "fp8":
        return green("server.kv_cache is auto: keys and values stay in the model's dtype")
    gpus = server_gpus(readings, config)
    mend = "leave server.kv_cache at auto, or compare greedy answers and acceptance length with auto first"
    if any(gpu.capability[0] == 12 for gpu in gpus):
        return red(
            f"server.kv_cache is fp8 on {gpus[0].name}: random text and very slow decoding were seen there", mend
        )
    return yellow("server.kv_cache is fp8: without calibrated scales answers and acceptance get worse", mend)


def memory_headroom(readings: Readings, config: Config) -> Finding:
    """Device memory that a long prefill finds beside weights, pool and graphs."""
    gpus = server_gpus(readings, config)
    if not gpus:
        return NO_GPU_SERVER
    fraction = config.server.memory_fraction
    if fraction is None:
        return green("server.memory_fraction is not set: SGLang leaves what it thinks right")
    smallest = min(gpu.free for gpu in gpus) / GIB
    left = smallest * (1 - fraction) - RUNTIME_GIB
    evidence = (
        f"server.memory_fraction {fraction:g} of {smallest:.1f} GiB leaves {left:.1f} GiB for a long prefill, after "
        f"{RUNTIME_GIB} GiB for graphs and workspaces"
    )
    fits = max(0.0, 1 - (WANTED_GIB + RUNTIME_GIB) / smallest) if smallest else 0.0
    mend = (
        f"lower server.memory_fraction to {int(fits * 100) / 100:.2f}; lower is also right when it runs out of memory "
        "at work, higher when it does so at its start"
    )
    if left < LEAST_GIB:
        return red(evidence, mend)
    return yellow(evidence, mend) if left < WANTED_GIB else green(evidence)


def pool_size(readings: Readings, config: Config) -> Finding:
    """The key-value pool that servers offered, against the plan."""
    pools = [pool for pool in readings.run.pools if pool.offered is not None]
    if not pools:
        return does_not_apply("no server of this run has started here yet")
    short = [pool for pool in pools if pool.planned and (pool.offered or 0) < OFFERED_SHARE * pool.planned]
    if short:
        return red(
            "; ".join(f"{pool.server}: {pool.offered:,} tokens, planned {pool.planned:,}" for pool in short),
            "free device memory, raise server.memory_fraction, or lower server.pool_tokens",
        )
    return green("; ".join(f"{pool.server}: {pool.offered:,} tokens" for pool in pools))


def host_cache(readings: Readings, config: Config) -> Finding:
    """Pinned host memory of the hierarchical cache, all ranks together."""
    size, ranks = config.server.host_cache_gb, config.server.tensor_parallel
    if not size:
        return does_not_apply("server.host_cache_gb is 0: no host cache")
    try:
        check_host_cache(size, ranks, readings.host.available)
    except EyrieError as error:
        swap = "no swap" if not readings.host.swap else f"{gib(readings.host.swap)} of swap do not help: it is pinned"
        evidence, _, fits = str(error).partition("; ")
        return red(f"{evidence.removeprefix('server.host_cache_gb: ')}; {swap}", f"lower server.host_cache_gb: {fits}")
    return green(f"{size} GB for each of {ranks} ranks, {gib(readings.host.available)} of host memory are free")


def build_memory(readings: Readings, config: Config) -> Finding:
    """Memory for compiling kernels; without swap, one compiler too many is killed and takes the server with it."""
    if not serves_on_gpu(readings, config):
        return NO_GPU_SERVER
    host, asked = readings.host, config.server.build_jobs
    allowed = build_jobs(host.cores, host.available, host.swap)
    jobs = asked or allowed
    evidence = f"{jobs} compilers of {COMPILER_GIB} GiB at once, {gib(host.available)} free, {gib(host.swap)} of swap"
    needed = jobs * COMPILER_GIB * GIB
    if needed > host.available + host.swap:
        mend = "free host memory or add swap" if jobs == 1 else f"set server.build_jobs to {allowed} or take it out"
        return red(evidence, mend)
    if jobs > allowed:
        return yellow(evidence, f"set server.build_jobs to {allowed} or take it out")
    return green(evidence)
