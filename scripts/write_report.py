"""Write the report of a run (HTML, for people) and its STATUS.md (the engineering record)."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="config.resolved.yaml of the run")
    parser.add_argument("--run-dir", type=Path, required=True, help="results/<run>")
    parser.add_argument("--out", type=Path, required=True, help="report.html to write")
    parser.add_argument("--status", type=Path, required=True, help="STATUS.md to write")
    args = parser.parse_args()

    from eyrie.report import write_report

    write_report(args.config, args.run_dir, args.out, args.status)


if __name__ == "__main__":
    run_cli(main)
