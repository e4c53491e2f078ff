"""The guard: parent of a server, leader of its session, and the end of it when whoever started it is gone.

supervisor -> guard -> server and its workers. The guard stops all of them when it is told to (SIGTERM), when the
server's first process ends, and when the supervisor dies. Should the guard itself be killed, the server's first
process gets SIGKILL from the kernel, and the supervisor ends what is left of the group.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from eyrie.locks import take
from eyrie.servers.process import adopt_orphans, die_with_parent, members, send, wait_for

POLL_S = 0.2


def start_guarded(command: Sequence[str], environment: Mapping[str, str], log: Path, lock: Path, grace_s: float) -> int:
    """Fork a guard that runs ``command``; its pid is also its process group and session.

    Args:
        environment: the whole environment of the server.
        log: standard output and error of the server are appended here.
        lock: held by the guard for its life. A guard whose supervisor was killed may still be stopping its server, and
            the next one waits for it, so that two servers never share the memory of one.
        grace_s: seconds between SIGTERM and SIGKILL.
    """
    caller = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        # locks and sockets of the caller must not stay open here after its death
        os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, null), (1, out), (2, out)):
            os.dup2(source, target)
        if take(lock, seconds=2 * grace_s + 10.0) is None:
            print("an earlier server of this folder does not stop", file=sys.stderr, flush=True)
        else:
            status = _guard(command, environment, caller, grace_s)
    finally:
        os._exit(status)  # never into the caller's own code


def _guard(command: Sequence[str], environment: Mapping[str, str], caller: int, grace_s: float) -> int:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: told.append(number))
    adopt_orphans()
    server = os.fork()
    if not server:
        _become(command, environment)
    status: int | None = None
    while status is None and not told and os.getppid() == caller:
        time.sleep(POLL_S)
        status = _reap(server)
    own = os.getpid()
    send(members(own), signal.SIGTERM)
    if not wait_for(lambda: _gone(own, server), grace_s):
        send(members(own), signal.SIGKILL)
        wait_for(lambda: _gone(own, server), grace_s)
    return 0 if told or status is None else status


def _become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    guard = os.getppid()
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        die_with_parent()
        if os.getppid() == guard:
            os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


def _reap(server: int) -> int | None:
    """Exit status of the server once it has ended; every adopted orphan that ended is reaped on the way."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 0 if ended is None else ended
        if pid == 0:
            return ended
        if pid == server:
            code = os.waitstatus_to_exitcode(status)
            ended = code if code >= 0 else 128 - code


def _gone(guard: int, server: int) -> bool:
    _reap(server)
    return not members(guard)
