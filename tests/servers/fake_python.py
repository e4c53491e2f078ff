"""Plays the interpreter of an environment with SGLang: says its version, and serves with ``launched_server.py``.

Used through :func:`write_python`, which makes a file that a config can name as ``server.python``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

VERSION = "0.5.23"
FAKE = Path(__file__).with_name("launched_server.py")


def write_python(folder: Path, token_s: float = 0.0) -> Path:
    """An executable; every server started by it notes its pids, its cache and the prompts it is asked in ``folder``.

    One with an fp8 cache reads there how far it strays (``drift``).
    """
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {folder} {token_s} "$@"\n')
    path.chmod(0o755)
    return path


def main() -> None:
    folder, token_s, *arguments = sys.argv[1:]
    if arguments[0] == "-c":
        print(VERSION)
        return
    assert arguments[:2] == ["-m", "sglang.launch_server"], arguments
    given = {name: arguments[arguments.index(f"--{name}") + 1] for name in ("port", "served-model-name")}
    pool = arguments[arguments.index("--max-total-tokens") + 1]
    command = [sys.executable, str(FAKE), "--port", given["port"], "--name", given["served-model-name"], "--pool", pool]
    command += ["--pids", f"{folder}/pids", "--asked", f"{folder}/asked", "--token-s", token_s]
    cache = arguments[arguments.index("--kv-cache-dtype") + 1]
    if cache != "auto":
        command += ["--drift", Path(folder, "drift").read_text()]
    with Path(folder, "caches").open("a") as file:
        file.write(f"{cache}\n")
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()
