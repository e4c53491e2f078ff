"""Ingest one prompt shard of a dataset."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: source and shard")
    parser.add_argument("--name", required=True, help="name of the dataset")
    parser.add_argument("--out", type=Path, required=True, help="prompt shard to write (.jsonl.zst)")
    args = parser.parse_args()

    from eyrie.datasets import ingest

    ingest(args.recipe, args.name, args.out)


if __name__ == "__main__":
    run_cli(main)
