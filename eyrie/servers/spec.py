"""What a managed server is (its spec) and how it is doing (its state), as files in one folder."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from eyrie.errors import EyrieError
from eyrie.formats.publish import write_text
from eyrie.locks import is_held


class Spec(BaseModel):
    """All that starts a server, and what it must offer to be accepted.

    Attributes:
        command: its argument vector; ``{port}``, ``{nccl_port}`` and ``{name}`` are filled in at every start. ``name``
            is new each time and must come back from ``/v1/models``: a stranger on the same port is no server of ours.
        environment: set on top of the caller's environment.
        probe_ids: prompt of the readiness check.
        planned_pool_tokens: key-value tokens that the plan counts on; a server that offers under 0.9 of them is
            refused. None: not compared.
        start_timeout_s: from start to the first answer.
        idle_s: how long it is kept without a lease.
        grace_s: between SIGTERM and SIGKILL.
        backoff_s: first wait before a restart; it doubles with every further death, up to 60 s.
        max_restarts: deaths in a row after which it is given up.
        gpus: indices of the devices whose memory is watched at its end; empty on a CPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: tuple[str, ...]
    environment: dict[str, str] = {}
    probe_ids: tuple[int, ...] = (1,)
    planned_pool_tokens: int | None = None
    start_timeout_s: float = 900.0
    idle_s: float = 120.0
    grace_s: float = 30.0
    backoff_s: float = 1.0
    max_restarts: int = 6
    gpus: tuple[int, ...] = ()

    def folder(self, root: Path) -> Path:
        """Where this server keeps its files: one folder per host and spec, so equal specs share one server."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        return root / f"{socket.gethostname()}-{digest}"


class State(BaseModel):
    """How the server is doing; written by its supervisor alone.

    Attributes:
        supervisor, guard: process ids; the guard's is also the server's process group.
        starts: how often it was started; ``restarts`` how often because it died.
        pool_tokens: key-value tokens that it offers, from its log.
        tokens_per_s: last generation throughput in its log.
        reason: why it is restarting, failed or stopped.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    phase: Literal["starting", "ready", "restarting", "stopping", "stopped", "failed"]
    url: str = ""
    supervisor: int = 0
    guard: int = 0
    starts: int = 0
    restarts: int = 0
    pool_tokens: int | None = None
    tokens_per_s: float | None = None
    version: str = ""
    reason: str = ""

    @property
    def life(self) -> tuple[int, int]:
        """Differs between any two starts of the server."""
        return self.supervisor, self.starts


class Files:
    """Names inside a server's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec = folder / "spec.json"
        self.state = folder / "state.json"
        self.log = folder / "server.log"
        self.supervisor_log = folder / "supervisor.log"
        self.gate = folder / "gate.lock"
        self.alive = folder / "supervisor.lock"
        self.guarded = folder / "guard.lock"
        self.leases = folder / "leases"

    def is_leased(self) -> bool:
        """Whether a living job holds a lease; final only while the gate is held."""
        return any(is_held(path) for path in self.leases.iterdir())

    def read_spec(self) -> Spec:
        try:
            return Spec.model_validate_json(self.spec.read_text())
        except (OSError, ValidationError) as error:
            raise EyrieError(f"{self.spec}: no server spec ({error}); remove the folder and run again") from None

    def read_state(self) -> State | None:
        try:
            return State.model_validate_json(self.state.read_text())
        except (FileNotFoundError, ValidationError):
            return None

    def write_state(self, state: State) -> None:
        write_text(self.state, state.model_dump_json(indent=1) + "\n")

    def log_tail(self, start: int = 0, lines: int = 12) -> str:
        """The last lines of the server's log behind byte ``start``, as one line."""
        try:
            with self.log.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(start, size - 16_384))
                text = file.read().decode(errors="replace")
        except OSError:
            return ""
        return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-lines:])


def dump_spec(spec: Spec) -> str:
    return json.dumps(spec.model_dump(mode="json"), indent=1) + "\n"
