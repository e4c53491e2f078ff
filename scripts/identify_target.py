"""Write the card of a target model: hashes of its weights, tokenizer and template; sizes; stop ids."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: which target")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="target.json to write")
    args = parser.parse_args()

    from eyrie.targets import identify

    identify(args.recipe, args.model, args.out)


if __name__ == "__main__":
    run_cli(main)
