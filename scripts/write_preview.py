"""Write the preview of a run: random rows of each dataset as they are trained on, and what was left out (HTML)."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: the target")
    parser.add_argument("--config", type=Path, required=True, help="config.resolved.yaml of the run")
    parser.add_argument("--run-dir", type=Path, required=True, help="results/<run>")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id of the tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="page to write (.html)")
    parser.add_argument("--rows", type=int, default=4, help="rows shown of each dataset")
    parser.add_argument("--seed", type=int, default=0, help="which rows; another number shows others")
    args = parser.parse_args()

    from eyrie.preview import write_preview

    write_preview(
        args.recipe, config=args.config, run_dir=args.run_dir, model=args.model, out=args.out, rows=args.rows,
        seed=args.seed,
    )  # fmt: skip


if __name__ == "__main__":
    run_cli(main)
