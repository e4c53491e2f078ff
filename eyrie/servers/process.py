"""Processes of a server: who belongs to it, how it is stopped, which ports are free. Linux (reads ``/proc``)."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

PROC = Path("/proc")


def die_with_parent() -> None:
    """This process gets SIGKILL when its parent dies; holds across ``exec``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def members(leader: int) -> list[int]:
    """Living processes of the group that ``leader`` leads and its descendants in other groups, itself left out."""
    parent, group = _table()
    found = {pid for pid, of in group.items() if of == leader}
    while True:
        more = {pid for pid, of in parent.items() if (of == leader or of in found) and pid not in found}
        if not more:
            return sorted(found - {leader})
        found |= more


def _table() -> tuple[dict[int, int], dict[int, int]]:
    """Parent and process group of every living (not zombie) process."""
    parent, group = {}, {}
    for folder in PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # the name (field 2) may hold spaces and brackets: read behind its last bracket
            state, ppid, pgrp = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue  # gone since it was listed
        if state not in "ZX":
            parent[int(folder.name)], group[int(folder.name)] = int(ppid), int(pgrp)
    return parent, group


def send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def wait_for(done: Callable[[], bool], seconds: float, every: float = 0.05) -> bool:
    """Poll ``done`` until it holds; False when it never did."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() >= end:
            return False
        time.sleep(every)
    return True


def free_ports(count: int, preferred: tuple[int, ...] = ()) -> tuple[int, ...]:
    """``count`` different TCP ports that nobody listens on, on the loopback and on all interfaces.

    Chosen at random below the range from which the kernel takes ports for outgoing connections, so that none of those
    can take one before the server does. ``preferred`` is returned when it is still free as a whole.
    """
    if len(preferred) == count and all(map(_is_free, preferred)):
        return preferred
    top = int((PROC / "sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    bottom = 10_000 if top > 12_000 else 1_024
    chosen: list[int] = []
    for port in random.SystemRandom().sample(range(bottom, top), min(2_000, top - bottom)):
        if _is_free(port):
            chosen.append(port)
            if len(chosen) == count:
                return tuple(chosen)
    raise OSError(f"no {count} free ports between {bottom} and {top}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
