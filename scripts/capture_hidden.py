"""Capture the target's hidden states over one token shard."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: layers and storage")
    parser.add_argument("--tokens", type=Path, required=True, help="token shard (.parquet)")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="hidden shard to write (.safetensors)")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens per capture batch")
    parser.add_argument("--device", default="auto", help="torch device")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    from eyrie.capture import capture

    capture(
        args.recipe,
        tokens=args.tokens,
        target=args.target,
        model=args.model,
        out=args.out,
        batch_tokens=args.batch_tokens,
        device=args.device,
        threads=args.threads,
    )


if __name__ == "__main__":
    run_cli(main)
