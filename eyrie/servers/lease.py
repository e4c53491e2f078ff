"""Leases: how a job uses a server that it shares with other jobs."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import eyrie
from eyrie.errors import EyrieError
from eyrie.formats.publish import write_text
from eyrie.locks import is_held, locked, take
from eyrie.servers.process import wait_for
from eyrie.servers.spec import Files, Spec, State, dump_spec

POLL_S = 0.1


class Lease:
    """A running server, for as long as the lease is held."""

    def __init__(self, files: Files, spec: Spec) -> None:
        self.files, self.spec = files, spec

    @property
    def log(self) -> Path:
        return self.files.log

    def ready(self) -> State:
        """Wait until the server answers, whatever happened to it meanwhile, and return its state.

        Call it again after a lost connection: a server that died is restarted by its supervisor, perhaps on another
        port, and a supervisor that died is replaced here.

        Raises:
            EyrieError: it was given up or refused; the message holds the reason and the log's last lines.
        """
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            if (state := self.look()) is not None:
                return state
            time.sleep(POLL_S)
        raise EyrieError(f"{self.files.log}: the server did not become ready within {self.patience:.0f} s")

    def look(self) -> State | None:
        """Its state if it answers now, else None; a supervisor that died is replaced. Raises :class:`EyrieError` as
        :meth:`ready` does."""
        supervised = is_held(self.files.alive)  # before the state: what a dead supervisor wrote last is final
        state = self.files.read_state()
        if state is not None and state.phase == "failed":
            raise EyrieError(f"{self.files.log}: the server {state.reason}")
        if not supervised:
            with locked(self.files.gate):
                _start_supervisor(self.files, self.spec)
        elif state is not None and state.phase == "ready" and _listens(state.url):
            return state
        return None

    @property
    def patience(self) -> float:
        """Seconds that a start, or a restart, may take."""
        return (self.spec.start_timeout_s + 60.0) * 2


def _listens(url: str) -> bool:
    """Whether the port is open: a server that just died is noticed here before its supervisor has noticed."""
    host, port = url.removeprefix("http://").split(":")
    try:
        socket.create_connection((host, int(port)), timeout=5.0).close()
    except OSError:
        return False
    return True


@contextmanager
def lease(spec: Spec, root: Path) -> Iterator[Lease]:
    """Use the server that ``spec`` describes; start it when it is not running.

    Args:
        root: folder for the files of servers; equal specs under one root share one server (per host).

    Raises:
        EyrieError: the server cannot be had; see :meth:`Lease.ready`.
    """
    files = Files(spec.folder(root.resolve()))
    files.leases.mkdir(parents=True, exist_ok=True)
    with locked(files.gate):
        own = files.leases / f"{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = take(own)
        if descriptor is None:
            raise RuntimeError(f"{own}: a new lease is already locked")
        _start_supervisor(files, spec)
    try:
        held = Lease(files, spec)
        held.ready()
        yield held
    finally:
        own.unlink(missing_ok=True)
        os.close(descriptor)
        if spec.idle_s == 0:  # nobody else will use it: its memory is free when the job ends
            wait_for(lambda: not is_held(files.alive) or files.is_leased(), 4 * spec.grace_s + 120.0)


def _start_supervisor(files: Files, spec: Spec) -> None:
    """Start one unless a supervisor that is not about to end is there. Hold the gate."""
    while is_held(files.alive):
        state = files.read_state()
        if state is None or state.phase not in ("stopping", "stopped", "failed"):
            return
        time.sleep(POLL_S)  # it ends its server before it goes
    files.state.unlink(missing_ok=True)
    write_text(files.spec, dump_spec(spec))
    package = str(Path(eyrie.__file__).resolve().parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    with files.supervisor_log.open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "eyrie.servers.supervisor", str(files.folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
    if not wait_for(lambda: files.read_state() is not None or process.poll() is not None, 60.0):
        raise EyrieError(f"{files.supervisor_log}: the server's supervisor did not start within 60 s")
    if files.read_state() is None:
        tail = files.supervisor_log.read_text(errors="replace").strip().splitlines()[-1:]
        raise EyrieError(f"{files.supervisor_log}: the server's supervisor did not start ({' '.join(tail)})")
