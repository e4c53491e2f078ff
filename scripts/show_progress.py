"""Say how far a run's answers are, dataset by dataset and shard by shard."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of the run, such as results/smoke")
    args = parser.parse_args()

    from eyrie.config import load_config
    from eyrie.generate.board import boards, table

    datasets = load_config(args.run / "config.resolved.yaml").datasets
    answered = {name: dataset.token_budget for name, dataset in datasets.items() if dataset.kind == "answered"}
    print(table(answered, boards(args.run / "logs" / "generate")))


if __name__ == "__main__":
    run_cli(main)
