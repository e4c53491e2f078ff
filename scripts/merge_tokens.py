"""Index all token shards: splits, weights, what is left out and why, and the draft vocabulary."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: splits and vocabulary")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--tokens", type=Path, nargs="+", required=True, help="token shards, in config order")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()

    from eyrie.merge import merge

    merge(args.recipe, target=args.target, tokens=args.tokens, out=args.out)


if __name__ == "__main__":
    run_cli(main)
