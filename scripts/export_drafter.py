"""Write a drafter in the layout that SGLang loads, and prove it by reading it back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: revision of the stage")
    parser.add_argument("--drafter", type=Path, required=True, help="trained drafter folder")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args()

    from eyrie.export import export

    export(args.recipe, drafter=args.drafter, target=args.target, out=args.out)


if __name__ == "__main__":
    run_cli(main)
