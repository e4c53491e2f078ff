"""Measure an exported drafter: acceptance and speed against plain decoding, on held-out prompts."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: the suite's options")
    parser.add_argument("--suite", required=True, help="name of the suite")
    parser.add_argument("--export", type=Path, required=True, help="exported drafter folder")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--merged", type=Path, required=True, help="folder of the merged index")
    parser.add_argument("--tokens", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--out", type=Path, required=True, help="benchmark figures to write (.json)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    from eyrie.bench.stage import bench

    bench(
        args.recipe,
        suite=args.suite,
        export=args.export,
        target=args.target,
        model=args.model,
        merged=args.merged,
        tokens=args.tokens,
        out=args.out,
        threads=args.threads,
    )


if __name__ == "__main__":
    run_cli(main)
