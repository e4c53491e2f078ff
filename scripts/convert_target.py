"""Convert the GGUF that a package ships into the Hugging Face folder of the target."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: what to convert")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()

    from eyrie.targets import convert_gguf

    convert_gguf(args.recipe, args.out)


if __name__ == "__main__":
    run_cli(main)
