"""Write what follows from the config model: config/schema.json (for editors) and docs/config.md (for people)."""

from __future__ import annotations

import argparse
from pathlib import Path

from eyrie.config.reference import markdown_reference, schema_text
from eyrie.errors import run_cli
from eyrie.formats.publish import write_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the repository")
    args = parser.parse_args()
    write_text(args.root / "config" / "schema.json", schema_text())
    write_text(args.root / "docs" / "config.md", markdown_reference())


if __name__ == "__main__":
    run_cli(main)
