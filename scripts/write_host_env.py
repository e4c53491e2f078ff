"""Write envs/host.yaml, the conda form of the environment, from the locks that .venv is made of."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.errors import run_cli
from eyrie.formats.publish import write_text

_HEAD = """\
# Written by scripts/write_host_env.py from host.txt and prompts.txt; a test keeps them equal.
# Used only with `snakemake --software-deployment-method conda`; without it jobs run in the environment of Snakemake.
channels:
  - conda-forge
  - nodefaults
dependencies:
  - python =3.11
  - pip
  - pip:
"""


def host_env(folder: Path) -> str:
    """The YAML text for the locks in ``folder``. Packages of prompts.txt come without their own dependencies."""
    pinned = _requirements(folder / "host.txt")
    without_dependencies = _requirements(folder / "prompts.txt")
    lines = ["--no-deps", *pinned, *without_dependencies]
    return _HEAD + "".join(f"      - {line}\n" for line in lines)


def _requirements(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=Path, default=Path(__file__).resolve().parents[1] / "envs")
    args = parser.parse_args()
    write_text(args.envs / "host.yaml", host_env(args.envs))


if __name__ == "__main__":
    run_cli(main)
