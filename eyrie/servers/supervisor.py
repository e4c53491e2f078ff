"""The supervisor: starts one server, waits until it really answers, restarts it, and stops it when nobody needs it.

Started by :func:`eyrie.servers.lease.lease` as a process in a session of its own, so that a workflow that is killed
does not take down a server that other jobs lease, and does not leave one behind either.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from types import FrameType

from eyrie.locks import locked, take
from eyrie.servers.guard import start_guarded
from eyrie.servers.memory import used_bytes, wait_until_returned
from eyrie.servers.probe import LogReader, generates, served_names, version_of
from eyrie.servers.process import adopt_orphans, free_ports, members, send, wait_for
from eyrie.servers.spec import Files, State

POLL_S = 0.25
HEALTHY_S = 600.0
"""After this long without a death the count of deaths starts anew."""
LONGEST_BACKOFF_S = 60.0
LEAST_POOL = 0.9
MEMORY_BACK_S = 60.0

NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
"""They belong to Eyrie's interpreter; the server has its own."""

log = logging.getLogger("eyrie.servers")


class End(Enum):
    """Why a started server is no longer waited for or watched."""

    READY = auto()
    DIED = auto()
    REFUSED = auto()
    UNUSED = auto()
    TOLD = auto()


@dataclass
class Running:
    """One start of the server."""

    guard: int
    url: str
    name: str
    reader: LogReader
    log_start: int
    memory: dict[int, int]
    reason: str = ""


class Supervisor:
    """Runs until the server is unused, given up, or SIGTERM comes."""

    def __init__(self, folder: Path) -> None:
        self.files = Files(folder)
        self.spec = self.files.read_spec()
        self.told = False
        self.ports: tuple[int, ...] = ()
        self.state = State(phase="starting", supervisor=os.getpid())
        self.unused_since: float | None = None

    def run(self) -> None:
        """Start, watch and restart until there is a reason to end."""
        deaths, was_ready = 0, False
        while True:
            running = self.start()
            ready_at: float | None = None
            end = self.until_ready(running)
            if end is End.READY:
                was_ready, ready_at = True, time.monotonic()
                self.say("ready", url=running.url, pool_tokens=running.reader.pool_tokens, reason="",
                         version=version_of(running.url))  # fmt: skip
                end = self.watch(running)
            if end in (End.UNUSED, End.TOLD):
                reason = "no lease" if end is End.UNUSED else "told to stop"
                self.say("stopping", reason=reason)
                self.finish(running)
                return self.say("stopped", reason=reason)
            if end is End.REFUSED:
                self.finish(running)
                return self.say("failed", reason=running.reason)
            lived = 0.0 if ready_at is None else time.monotonic() - ready_at
            deaths = 1 if lived > HEALTHY_S else deaths + 1
            running.reason = running.reason or self.why_it_died(running)
            left = self.finish(running)
            if left or deaths > self.spec.max_restarts or not (was_ready or running.reader.port_taken):
                return self.say("failed", reason=left or running.reason)
            if not self.back_off(deaths, running.reason):
                return self.say("stopped", reason="told to stop while restarting")

    def start(self) -> Running:
        """Start the server on free ports: those of its last life when they are still free."""
        self.ports = free_ports(2, self.ports)
        name = f"eyrie-{secrets.token_hex(6)}"
        filled = {"port": str(self.ports[0]), "nccl_port": str(self.ports[1]), "name": name}
        command = [_fill(part, filled) for part in self.spec.command]
        memory = used_bytes(self.spec.gpus)
        with self.files.log.open("a") as file:
            file.write(f"# {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(command)}\n")
        begin = self.files.log.stat().st_size
        environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
        environment |= self.spec.environment
        guard = start_guarded(command, environment, self.files.log, self.files.guarded, self.spec.grace_s)
        self.say("starting", guard=guard, url="", starts=self.state.starts + 1, pool_tokens=None)
        url = f"http://127.0.0.1:{self.ports[0]}"
        return Running(guard, url, name, LogReader(self.files.log, begin), begin, memory)

    def until_ready(self, running: Running) -> End:
        """Wait for a real answer of our own server and a pool as large as planned."""
        end = time.monotonic() + self.spec.start_timeout_s
        while True:
            if (ended := self.ended(running)) is not None:
                return ended
            if self.answers(running):
                break
            if time.monotonic() > end:
                tail = self.files.log_tail(running.log_start)
                running.reason = f"gave no answer within {self.spec.start_timeout_s:.0f} s; its log ends: {tail}"
                return End.REFUSED
            time.sleep(POLL_S)
        running.reader.read()
        planned, pool = self.spec.planned_pool_tokens, running.reader.pool_tokens
        if planned is not None and (pool is None or pool < LEAST_POOL * planned):
            running.reason = (
                f"offers a pool of {'unknown size' if pool is None else f'{pool:,} key-value tokens'}, the plan counts "
                f"on {planned:,}: free device memory, raise server.memory_fraction or lower server.pool_tokens"
            )
            return End.REFUSED
        return End.READY

    def watch(self, running: Running) -> End:
        """Stay until it dies, is unused for ``idle_s``, or we are told to stop; keep the throughput in the state."""
        told = time.monotonic()
        while (ended := self.ended(running)) is None:
            running.reader.read()
            now = time.monotonic()
            if now - told >= 5.0 and running.reader.tokens_per_s != self.state.tokens_per_s:
                told = now
                self.say("ready", tokens_per_s=running.reader.tokens_per_s)
            time.sleep(POLL_S)
        return ended

    def ended(self, running: Running) -> End | None:
        """The reason to wait no longer, if there is one. The guard stays unreaped, so its group id stays its own."""
        if self.told:
            return End.TOLD
        if _has_ended(running.guard):
            running.reader.read()
            return End.DIED
        return End.UNUSED if self.is_unused() else None

    def is_unused(self) -> bool:
        """True once no lease was held for ``idle_s``; the state says so before a new lease can be taken."""
        if self.files.is_leased():
            self.unused_since = None
            return False
        now = time.monotonic()
        self.unused_since = now if self.unused_since is None else self.unused_since
        if now - self.unused_since < self.spec.idle_s:
            return False
        with locked(self.files.gate):
            if self.files.is_leased():
                return False
            for path in list(self.files.leases.iterdir()):
                path.unlink(missing_ok=True)
            self.say("stopping", reason="no lease")
        return True

    def answers(self, running: Running) -> bool:
        try:
            return running.name in served_names(running.url) and generates(running.url, self.spec.probe_ids)
        except (OSError, ValueError, AttributeError):
            return False

    def finish(self, running: Running) -> str:
        """Stop the guard and all it guards; empty, or what is wrong with the memory afterwards."""
        patience = 2 * self.spec.grace_s + 5.0
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.guard, signal.SIGTERM)
        if not wait_for(lambda: _has_ended(running.guard), patience):
            log.warning("guard %d did not end within %.0f s", running.guard, patience)
        # whatever a killed guard left was adopted by this process, and it has no other children
        send([running.guard, *members(os.getpid())], signal.SIGKILL)
        wait_for(_reaped_all, patience)
        return wait_until_returned(running.memory, MEMORY_BACK_S) if running.memory else ""

    def back_off(self, deaths: int, reason: str) -> bool:
        """Wait before the next start; False when told to stop meanwhile."""
        seconds = min(LONGEST_BACKOFF_S, self.spec.backoff_s * 2 ** (deaths - 1))
        self.say("restarting", url="", guard=0, restarts=self.state.restarts + 1, reason=reason)
        return not wait_for(lambda: self.told, seconds)

    def why_it_died(self, running: Running) -> str:
        ended = os.waitid(os.P_PID, running.guard, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        status = ended.si_status if ended is not None else 0
        return f"ended with status {status}; its log ends: {self.files.log_tail(running.log_start)}"

    def say(self, phase: str, **changes: object) -> None:
        """Publish the state and log each change of phase."""
        before = self.state.phase
        self.state = State.model_validate({**self.state.model_dump(), "phase": phase, **changes})
        self.files.write_state(self.state)
        if phase != before or phase == "starting":
            log.info("%s %s %s", time.strftime("%H:%M:%S"), phase, self.state.reason or self.state.url)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reaped_all() -> bool:
    """Reap every child that ended; True when there is none left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _fill(part: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        part = part.replace("{" + name + "}", value)
    return part


def main(folder: Path) -> None:
    """Supervise the server of ``folder``, unless another process already does."""
    files = Files(folder)
    if take(files.alive) is None:
        return
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    adopt_orphans()
    supervisor = Supervisor(folder)

    def tell(_number: int, _frame: FrameType | None) -> None:
        supervisor.told = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, tell)
    try:
        supervisor.run()
    except BaseException as error:
        supervisor.say("failed", reason=f"its supervisor failed: {type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    main(Path(sys.argv[1]))
