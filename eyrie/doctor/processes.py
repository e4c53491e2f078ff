"""Whose a process is. Linux, through psutil; of processes that cannot be seen only the number is known."""

from __future__ import annotations

import os
from functools import cached_property
from typing import Literal

import psutil

from eyrie.doctor.readings import Holder

SUPERVISOR = "eyrie.servers.supervisor"


class Family:
    """The workflow that this process belongs to: everything below its topmost Snakemake, or below itself."""

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid or os.getpid()

    @cached_property
    def head(self) -> int:
        try:
            parents = psutil.Process(self.pid).parents()
        except psutil.Error:
            return self.pid
        mine = [parent.pid for parent in parents if "snakemake" in _command(parent)]
        return mine[-1] if mine else self.pid

    def has(self, process: psutil.Process) -> bool:
        """Whether the process is of this workflow, or below a supervisor of Eyrie's servers."""
        line = [process, *process.parents()]
        return any(one.pid == self.head or SUPERVISOR in _command(one) for one in line)


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def holder(pid: int, amount: int | None, family: Family) -> Holder:
    """What is known of a process that holds device memory."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            state: Literal["running", "zombie"] = "zombie" if process.status() == psutil.STATUS_ZOMBIE else "running"
            return Holder(
                pid=pid,
                bytes=amount,
                user=_user(process),
                name=process.name(),
                state=state,
                orphaned=process.ppid() in (0, 1) and pid != 1,
                ours=family.has(process),
            )
    except psutil.Error:
        return Holder(pid=pid, bytes=amount, state="hidden")


def _user(process: psutil.Process) -> str:
    try:
        return process.username()
    except (psutil.Error, KeyError):
        return "?"
