"""Everything that the doctor measures, as data: a check sees this and the config, and nothing else.

Readings are taken from the machine (:mod:`eyrie.doctor.live`) or loaded from JSON (:func:`load_readings`): what one
machine said can be looked at again on another.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eyrie.errors import EyrieError

GIB = 1 << 30
MIB = 1 << 20


class Reading(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Holder(Reading):
    """A process with memory on a GPU.

    Attributes:
        bytes: None when the driver does not say (another container).
        state: ``zombie`` has ended and is not reaped; ``hidden`` is known to the driver alone.
        orphaned: whoever started it is gone, and it now belongs to process 1.
        ours: it was started by this workflow, or is a server that Eyrie supervises.
    """

    pid: int
    bytes: int | None = None
    user: str = "?"
    name: str = "?"
    state: Literal["running", "zombie", "hidden"] = "running"
    orphaned: bool = False
    ours: bool = False


class Gpu(Reading):
    """One device, by its NVML index. Bytes; ``used`` is without what the driver reserves.

    Attributes:
        capability: compute capability, such as ``(12, 0)``.
        uncorrected: memory errors since the driver was loaded that ECC could not mend; None without ECC.
        throttled: why its clocks are held down, where that is a fault (heat, power supply).
        holders_known: whether the driver listed the processes.
    """

    index: int
    name: str
    total: int
    free: int
    used: int
    capability: tuple[int, int]
    uncorrected: int | None = None
    throttled: tuple[str, ...] = ()
    holders: tuple[Holder, ...] = ()
    holders_known: bool = True


class Link(Reading):
    """How two GPUs reach each other.

    Attributes:
        path: the worst thing between them, in the words of ``nvidia-smi topo -m``.
        peer: whether the driver says that they can read each other's memory.
    """

    a: int
    b: int
    path: Literal["NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS"]
    peer: bool


class Trial(Reading):
    """An all-reduce over all GPUs that was really run.

    Attributes:
        environment: variables that it was given.
        seconds: how long it took; None when it did not end in time or failed.
        said: its last words.
    """

    environment: dict[str, str]
    seconds: float | None = None
    said: str = ""


class Host(Reading):
    """The machine itself. Bytes; ``available`` obeys the container's limit.

    Attributes:
        sees_all: whether the numbers of processes here are those of the driver. Not so in a container, where even a
            server of ours can look like memory that nobody holds.
    """

    cores: int
    available: int
    swap: int
    shared: int | None = None
    open_files: int
    sees_all: bool = True
    kernel_flags: tuple[str, ...] = ()
    clock: datetime


class Disk(Reading):
    """The file system under a path; ``kind`` is its type, such as ``ext4`` or ``nfs4``."""

    path: str
    free: int
    total: int
    kind: str


class Export(Reading):
    """An exported drafter: its config, and what the layout's gates said (empty: nothing).

    Attributes:
        weights, vocabulary: faults of the tensors, and of the token map.
        trained: acceptance length that its training simulated on validation rows.
        coverage: share of the supervised tokens that its vocabulary holds.
        served, reference: acceptance length on the engine, and of the reference decoder on the same prompts.
        verdicts: the benchmark's sentence by suite, for those that advise against it.
        suites: acceptance length by suite.
    """

    config: dict[str, Any] = {}
    weights: str = ""
    vocabulary: str = ""
    coverage: float | None = None
    trained: float | None = None
    served: float | None = None
    reference: float | None = None
    suites: dict[str, float] = {}
    verdicts: dict[str, str] = {}


class Pool(Reading):
    """Key-value tokens of a server that Eyrie started: what was planned and what it offered last."""

    server: str
    planned: int | None = None
    offered: int | None = None


class RunFacts(Reading):
    """What the run's files say. Each is empty before the stage that makes it.

    Attributes:
        hidden_size: of the target; None until its card or folder is there.
        drafter_bytes: largest training state of a drafter.
        context: longest position of the target.
        tokenizer_faults, tokenizer_notes: from the self-test in the card.
        identified: whether the card is there.
        hidden_bytes: hidden states that are already on disk.
        row_tokens: tokens of the rows that are made so far, prompts included.
        incomplete: outputs that Snakemake knows to be half-made.
        locked: another Snakemake works in the folder, or one was killed.
    """

    identified: bool = False
    hidden_size: int | None = None
    drafter_bytes: int = 0
    context: int | None = None
    tokenizer_faults: tuple[str, ...] = ()
    tokenizer_notes: tuple[str, ...] = ()
    hidden_bytes: int = 0
    row_tokens: int = 0
    exports: dict[str, Export] = {}
    pools: tuple[Pool, ...] = ()
    incomplete: tuple[str, ...] = ()
    locked: bool = False


class Readings(Reading):
    """All of it.

    Attributes:
        disks: that of the run first.
        driver: version of the NVIDIA driver; empty without one.
        gpus_unreadable: why NVML said nothing although device files are there.
        driver_broken: whether that reason breaks CUDA as well.
        visible: NVML indices that a job may use, in its order.
        environment: variables that matter, names of keys with the value ``set``.
        versions: of installed packages.
        reached: by server URL, whether its port is open.
    """

    host: Host
    disks: tuple[Disk, ...] = ()
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpus_unreadable: str = ""
    driver_broken: bool = False
    visible: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    trials: tuple[Trial, ...] = ()
    environment: dict[str, str] = {}
    versions: dict[str, str] = {}
    reached: dict[str, bool] = {}
    run: RunFacts = RunFacts()

    def chosen(self, indices: Sequence[int]) -> list[Gpu]:
        """The GPUs with these NVML indices."""
        return [gpu for gpu in self.gpus if gpu.index in indices]


def load_readings(path: Path) -> Readings:
    """Readings that were written as JSON. Raises :class:`EyrieError` naming the first thing that is wrong."""
    try:
        return Readings.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EyrieError(f"{path}: cannot be read ({error.strerror}); give a doctor.json or a recording") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "top level"
        raise EyrieError(f"{path}: holds no readings ({where}: {fault['msg']}); record them again") from None
