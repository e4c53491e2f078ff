"""A trial: an all-reduce over several processes, with a deadline. Whether it ends is the whole question."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import eyrie
from eyrie.doctor.readings import MIB, Trial
from eyrie.servers.process import free_ports, wait_for

ROUNDS = 5
NUMBERS = 16 * MIB  # float32: 64 MiB, enough that NCCL takes the path that a prefill takes


def try_all_reduce(backend: str, ranks: int, environment: Mapping[str, str], seconds: float = 30.0) -> Trial:
    """Run one process per rank and end those that are still there at the deadline.

    Args:
        backend: ``nccl`` (a GPU per rank), or ``gloo`` (CPU).
        environment: set on top of this process's own.
    """
    port = str(free_ports(1)[0])
    package = str(Path(eyrie.__file__).resolve().parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    with ExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile("w+"))
        started = time.monotonic()
        processes = [
            subprocess.Popen(
                rank_command(backend, rank, ranks, port),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path, **environment},
            )
            for rank in range(ranks)
        ]
        for process in processes:
            stack.callback(process.wait)
            stack.callback(process.kill)
        ended = wait_for(lambda: _over(processes), seconds)
        took = time.monotonic() - started
        fine = ended and all(process.poll() == 0 for process in processes)
        log.seek(0)
        last = (log.read().strip().splitlines() or [""])[-1][:200]
        said = last if ended else f"no end within {seconds:.0f} s"
    return Trial(environment=dict(environment), seconds=round(took, 2) if fine else None, said="" if fine else said)


def _over(processes: list[subprocess.Popen[bytes]]) -> bool:
    """All have ended, or one has failed: the others would wait for it for ever."""
    codes = [process.poll() for process in processes]
    return None not in codes or any(code not in (None, 0) for code in codes)


def rank_command(backend: str, rank: int, ranks: int, port: str) -> list[str]:
    return [sys.executable, "-m", "eyrie.doctor.collective", backend, str(rank), str(ranks), port]


def main(backend: str, rank: int, ranks: int, port: str) -> None:
    """One rank. Exits with 1 when a sum is wrong: peer-to-peer that corrupts is worse than one that hangs."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    for _ in range(ROUNDS):
        numbers = torch.full((NUMBERS if backend == "nccl" else 1024,), float(rank + 1), device=device)
        dist.all_reduce(numbers)
        if not bool((numbers == ranks * (ranks + 1) / 2).all()):
            sys.exit("the all-reduce gave a wrong sum")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
