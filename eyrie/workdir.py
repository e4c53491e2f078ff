"""Who works in a folder, so that the locks of a killed Snakemake are told from those of a living one.

Snakemake's locks are files that a kill leaves behind. Beside them every workflow of Eyrie holds a lock of the kernel's,
shared with the others and gone with its process. Whoever finds itself alone knows that all other locks are of the dead.
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path

from eyrie.locks import share

log = logging.getLogger(__name__)

STATE, LIVING = ".snakemake", "eyrie.living"
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def enter(folder: Path) -> int | None:
    """Note that this process works in ``folder``, until it ends, and remove the locks that dead workflows left there.

    Call it before Snakemake makes locks of its own. They stay, for the person to decide, where it cannot be known that
    their owners are dead: a workflow on another machine was here (not every file system takes locks across machines),
    or the file system has no locks.

    Returns:
        the descriptor that holds the lock; None when the folder cannot be written or locked.
    """
    state, here = folder / STATE, _here()
    try:
        state.mkdir(exist_ok=True)
        descriptor = share(state / LIVING, lambda descriptor: _alone(state / "locks", descriptor, here))
        if here not in _known(descriptor):
            with (state / LIVING).open("a") as file:
                file.write(" ".join(sorted(here)) + "\n")
    except OSError as error:
        log.debug("%s: %s; locks of killed workflows stay", state, error)
        return None
    return descriptor


def _alone(locks: Path, descriptor: int, here: set[str]) -> None:
    """By the kernel's word nobody else is here: if it counts for all who were, forget them, and their locks."""
    left, known = list(locks.glob("*.lock")), _known(descriptor)
    if left and not (known and all(here & other for other in known)):
        return
    for path in left:
        path.unlink(missing_ok=True)
    if left:
        log.warning("%s: removed the locks of a workflow that was killed", locks)
    os.ftruncate(descriptor, 0)


def _known(descriptor: int) -> list[set[str]]:
    """The machines whose workflows were here since it was last known that no lock is left."""
    return [set(line.split()) for line in os.pread(descriptor, 1 << 16, 0).decode(errors="replace").splitlines()]


def _here() -> set[str]:
    """This machine by its name, which outlives its start, and by its start, which all containers on it share."""
    return {platform.node(), _BOOT.read_text().strip() if _BOOT.exists() else ""} - {""}
