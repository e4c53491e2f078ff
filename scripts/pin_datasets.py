"""Ask the hub for the commit of each hub dataset of a config, and write it into the file as `revision`."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="config of a run (.yaml); everything else in it stays as it is")
    args = parser.parse_args()

    from eyrie.datasets.pins import pin_datasets

    pin_datasets(args.config, print)


if __name__ == "__main__":
    run_cli(main)
