"""Serve an exported drafter beside its target and hold it against the reference decoder."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: suite and server options")
    parser.add_argument("--machine", type=json.loads, default={}, help="JSON: machine-level options of the server")
    parser.add_argument("--export", type=Path, required=True, help="exported drafter folder")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--merged", type=Path, required=True, help="folder of the merged index")
    parser.add_argument("--tokens", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--servers", type=Path, required=True, help="folder for the servers' logs and state")
    parser.add_argument("--out", type=Path, required=True, help="figures to write (.json)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    from eyrie.bench.serve import serve

    serve(
        args.recipe,
        args.machine,
        export=args.export,
        target=args.target,
        model=args.model,
        merged=args.merged,
        tokens=args.tokens,
        servers=args.servers,
        out=args.out,
        threads=args.threads,
    )


if __name__ == "__main__":
    run_cli(main)
