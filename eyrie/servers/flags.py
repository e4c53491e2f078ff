"""What each SGLang version accepts on its command line, and the check of ours against it."""

from __future__ import annotations

import difflib
import json
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from eyrie.errors import EyrieError

FOLDER = Path(__file__).with_name("flags")


@cache
def sglang_version(python: str) -> str:
    """The version that ``python`` would serve with; SGLang itself is not imported.

    Raises:
        EyrieError: no such interpreter, or no SGLang in it.
    """
    code = "from importlib.metadata import version; print(version('sglang'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    except OSError:
        raise EyrieError(
            f"server.python: there is no interpreter {python}; make it with `make serve-cpu`, or on a GPU machine "
            "install envs/serve.txt into an environment of its own and name its python here"
        ) from None
    if done.returncode:
        raise EyrieError(f"server.python: {python} has no SGLang; make its environment with `make serve-cpu`")
    return done.stdout.strip()


@cache
def accepted_flags(version: str) -> dict[str, dict[str, Any]]:
    """Argument names of ``version`` with how many values each takes and, where they are few, which.

    Raises:
        EyrieError: nobody recorded that version.
    """
    path = FOLDER / f"sglang-{version}.json"
    try:
        return dict(json.loads(path.read_text())["flags"])
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem.removeprefix("sglang-") for file in FOLDER.glob("sglang-*.json")))
        raise EyrieError(
            f"server.python: the arguments of SGLang {version} are not recorded (known: {known}); "
            "record them with scripts/record_server_flags.py --python <its python>"
        ) from None


def check_arguments(arguments: Sequence[str], version: str) -> None:
    """Every argument exists in ``version``, is given once, and has as many values, of the right kind, as it takes.

    Args:
        arguments: ``--name`` and its values, each a string of its own.

    Raises:
        EyrieError: with the argument and what to write instead.
    """
    flags = accepted_flags(version)
    seen: set[str] = set()
    for name, values in _grouped(arguments):
        if name not in flags:
            near = difflib.get_close_matches(name, flags, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0].removeprefix('--')!r}?" if near else ""
            raise EyrieError(f"server.flags: SGLang {version} has no argument {name.removeprefix('--')!r}{hint}")
        if name in seen:
            raise EyrieError(f"server.flags: {name.removeprefix('--')!r} is already set by Eyrie; leave it out")
        seen.add(name)
        takes, choices = flags[name]["takes"], flags[name].get("choices")
        wrong = len(values) != takes if isinstance(takes, int) else takes == "?" and len(values) > 1
        if wrong:
            raise EyrieError(f"server.flags: {name.removeprefix('--')!r} takes {takes} values, got {len(values)}")
        for value in values:
            if choices and value not in choices:
                raise EyrieError(
                    f"server.flags: {name.removeprefix('--')!r} is {value!r}; SGLang {version} knows "
                    f"{', '.join(choices)}"
                )


def _grouped(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for part in arguments:
        if part.startswith("--"):
            groups.append((part, []))
        elif groups:
            groups[-1][1].append(part)
        else:
            raise EyrieError(f"server.flags: {part!r} stands before any argument")
    return groups
