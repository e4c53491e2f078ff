"""Train one drafter on the merged rows and their hidden states."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: the drafter's options")
    parser.add_argument("--merged", type=Path, required=True, help="folder of the merged index and vocabulary")
    parser.add_argument("--tokens", type=Path, nargs="+", required=True, help="token shards")
    parser.add_argument("--hidden", type=Path, nargs="+", required=True, help="hidden shards, in the same order")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="drafter folder to write")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of the resumable checkpoints")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="optimiser steps between checkpoints")
    parser.add_argument("--device", default="auto", help="torch device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    from eyrie.train.stage import train

    train(
        args.recipe,
        merged=args.merged,
        tokens=args.tokens,
        hidden=args.hidden,
        target=args.target,
        model=args.model,
        out=args.out,
        checkpoints=args.checkpoints,
        checkpoint_every=args.checkpoint_every,
        device=args.device,
        threads=args.threads,
    )


if __name__ == "__main__":
    run_cli(main)
