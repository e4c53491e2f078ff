"""Turn one shard of responses (or of native conversations) into token rows."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: lengths and kind")
    parser.add_argument("--source", type=Path, required=True, help="response shard, or native prompt shard")
    parser.add_argument("--name", required=True, help="name of the dataset")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="token shard to write (.parquet)")
    args = parser.parse_args()

    from eyrie.tokenize_rows import tokenize

    tokenize(args.recipe, source=args.source, name=args.name, target=args.target, model=args.model, out=args.out)


if __name__ == "__main__":
    run_cli(main)
