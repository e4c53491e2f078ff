"""A job ends with the workflow that started it.

A workflow that is killed cannot stop its jobs. They would go on holding the device, the journal and the checkpoints,
and the next run would meet them there. So a job watches the process that started it, and goes when it is gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading

WORKFLOW = "EYRIE_WORKFLOW"
"""Environment variable that holds the process id of the workflow that runs the job; unset when run by hand."""


def end_with_workflow() -> None:
    """Watch the workflow from a thread; when it ends, this process gets SIGTERM.

    A parent-death signal would not do: a shell stands between the two, and the job must not end with a mere thread of
    the workflow. Without process descriptors (Linux before 5.3, other systems) nothing is watched.
    """
    pid = os.environ.get(WORKFLOW, "")
    if not pid.isdigit() or not hasattr(os, "pidfd_open"):
        return
    try:
        descriptor = os.pidfd_open(int(pid))
    except ProcessLookupError:
        _end(pid)
    except OSError:
        return
    else:
        threading.Thread(target=_watch, args=(descriptor, pid), daemon=True).start()


def _watch(descriptor: int, pid: str) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()  # readable once the process has ended
    _end(pid)


def _end(pid: str) -> None:
    with contextlib.suppress(OSError):  # whoever read it may be gone as well
        print(f"the workflow (process {pid}) has ended, so this job ends too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
