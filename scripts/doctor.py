"""Examine machine, config and run, and write what is wrong with them and how to mend it (Markdown and JSON)."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config of the run")
    parser.add_argument("--run-dir", type=Path, required=True, help="results/<run>")
    parser.add_argument("--servers", type=Path, required=True, help="folder with the servers' logs and state")
    parser.add_argument("--out", type=Path, required=True, help="page to write (.md); the .json stands beside it")
    parser.add_argument("--readings", type=Path, help="recorded readings (.json) to judge instead of this machine")
    args = parser.parse_args()

    from eyrie.config import load_config
    from eyrie.doctor import write_doctor

    write_doctor(
        load_config(args.config), run_dir=args.run_dir, servers=args.servers, out=args.out, readings=args.readings
    )


if __name__ == "__main__":
    run_cli(main)
