"""What a check says, and the helpers that checks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from eyrie.config import Config, Server
from eyrie.config.checks import CheckName
from eyrie.doctor.readings import Gpu, Readings

Verdict = Literal["green", "yellow", "red", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """A verdict with its evidence (for ``not applicable``: the reason) and, where something is wrong, the mend."""

    verdict: Verdict
    evidence: str
    mend: str = ""


@dataclass(frozen=True)
class Check:
    """A check of the closed list.

    Attributes:
        looks_at: what it examines, in a few words.
        guards: generation refuses to start when it is red. The others judge what later stages make.
        examine: the check itself.
    """

    name: CheckName
    looks_at: str
    guards: bool
    examine: Callable[[Readings, Config], Finding]


def green(evidence: str) -> Finding:
    return Finding("green", evidence)


def yellow(evidence: str, mend: str) -> Finding:
    return Finding("yellow", evidence, mend)


def red(evidence: str, mend: str) -> Finding:
    return Finding("red", evidence, mend)


def does_not_apply(why: str) -> Finding:
    return Finding("not applicable", why)


NO_GPU = does_not_apply("no NVIDIA GPU on this machine")
NO_GPU_USED = does_not_apply("the config leaves this machine's GPUs alone")
NO_GPU_SERVER = does_not_apply("no server on a GPU: server.device is cpu, or this machine has none")


def managed(config: Config) -> bool:
    """Whether generation itself is answered by a server that Eyrie starts."""
    return config.engine.managed


def for_generation(config: Config) -> Config:
    """The config as generation sees it: a server that it does not use keeps nobody from answering."""
    return config if managed(config) else config.model_copy(update={"server": Server(device="cpu")})


def serves_on_gpu(readings: Readings, config: Config) -> bool:
    """Whether ``server`` means a GPU: it says so, or leaves it open on a machine that has one."""
    return config.server.device == "cuda" or (config.server.device == "auto" and bool(readings.gpus))


def used_gpus(readings: Readings, config: Config) -> list[Gpu]:
    """The GPUs that the config puts something on: this process on the first, a server on as many as it shares."""
    count = config.server.tensor_parallel if serves_on_gpu(readings, config) else 0
    if config.engine.kind == "transformers" and config.engine.device != "cpu":
        count = max(count, 1)
    return readings.chosen(readings.visible[:count])


def server_gpus(readings: Readings, config: Config) -> list[Gpu]:
    """The GPUs that share the server's model; empty when it runs on none."""
    if not serves_on_gpu(readings, config):
        return []
    return readings.chosen(readings.visible[: config.server.tensor_parallel])


def gib(amount: float) -> str:
    return f"{amount / (1 << 30):,.1f} GiB"
