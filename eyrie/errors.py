"""The one exception that a person is meant to read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from eyrie.orphan import end_with_workflow


class EyrieError(Exception):
    """A fault that the user can mend.

    The message is one line: the file, row or config key at fault, then what to do about it.
    Scripts print it without a traceback and exit with 1; anything else is a bug and keeps its traceback.
    """


def run_cli(main: Callable[[], None]) -> None:
    """Run a script's ``main``; turn an :class:`EyrieError` (or a full disk) into one line and exit code 1.

    What Eyrie logs goes to stderr, line by line; what other libraries log is shown from warnings on. The process ends
    when the workflow that started it does (:mod:`eyrie.orphan`).
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("eyrie").setLevel(logging.INFO)
    end_with_workflow()
    try:
        main()
    except EyrieError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        import errno

        if error.errno == errno.ENOSPC:
            sys.exit(
                f"error: no space left on device while writing {error.filename or 'an output'}: "
                "free some space and run the same command again; nothing half-written was published"
            )
        raise
