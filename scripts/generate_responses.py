"""Let the target answer one prompt shard up to its token budget."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from eyrie.errors import run_cli


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=json.loads, required=True, help="canonical JSON: sampling and budget")
    parser.add_argument("--prompts", type=Path, required=True, help="prompt shard (.jsonl.zst)")
    parser.add_argument("--target", type=Path, required=True, help="target.json of the run")
    parser.add_argument("--model", required=True, help="local Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, required=True, help="response shard to write (.jsonl.zst)")
    parser.add_argument("--journal", type=Path, required=True, help="every answer paid for so far (.jsonl)")
    parser.add_argument("--afresh", choices=["yes", "no"], default="no", help="yes: set the journal aside first")
    parser.add_argument("--config", type=Path, help="config that says where the engine runs; default: in this process")
    parser.add_argument(
        "--servers", type=Path, default=Path("logs/servers"), help="folder for the files of a server that Eyrie starts"
    )
    parser.add_argument(
        "--progress",
        type=Path,
        help="file that says how far it is; default: logs/generate/<dataset>/<shard>.json of the run",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    args = parser.parse_args()

    from eyrie.config import load_config
    from eyrie.doctor import require_healthy
    from eyrie.generate.stage import generate

    config = load_config(args.config) if args.config else None
    shard = args.journal.with_suffix(".json")  # results/<run>/journal/<dataset>/<shard>
    dataset = args.prompts.parent.name
    generate(
        args.recipe,
        prompts=args.prompts,
        target=args.target,
        model=args.model,
        out=args.out,
        journal=args.journal,
        afresh=args.afresh == "yes",
        options=config.engine if config else None,
        server=config.server if config else None,
        servers=args.servers,
        gates=config.datasets[dataset].gates if config and dataset in config.datasets else None,
        progress=args.progress or shard.parents[2] / "logs" / "generate" / dataset / shard.name,
        threads=args.threads,
        checkup=partial(require_healthy, config, args.out.parents[2]) if config else None,
    )


if __name__ == "__main__":
    run_cli(main)
