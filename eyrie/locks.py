"""File locks that the kernel drops when their holder dies, however it dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def take(path: Path, seconds: float = 10.0) -> int | None:
    """Take the exclusive lock on ``path`` (made when missing) and keep it: its descriptor, or None if it stays taken.

    A look by :func:`is_held` holds a lock for an instant, so one refusal says nothing.
    """
    descriptor = _open(path)
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(descriptor)
                return None
            time.sleep(0.02)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the exclusive lock on ``path``, waiting for it."""
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def share(path: Path, alone: Callable[[int], None]) -> int:
    """Hold the shared lock on ``path`` (made when missing) and keep it: its descriptor.

    Args:
        alone: called with the descriptor when nobody else holds it, before anybody else can.
    """
    descriptor = _open(path)
    try:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock on ``path``; False when there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two looks at once do not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
