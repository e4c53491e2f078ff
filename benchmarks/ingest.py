"""Ingest: rows per CPU second and peak memory on one large JSONL file, and what the `datasets` library makes of it.

The file holds chats, single questions, reasoning in marks, and tool calls as JSON strings; `tools` is null for the
first tenth of it, as in many published sets. Each measurement runs in a process of its own: reading the file, making
a prompt shard of the whole of it, and streaming it with the library. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyrie.datasets import ingest
from eyrie.datasets.ingest import rejects_path
from eyrie.errors import run_cli
from eyrie.formats.jsonl import read_jsonl
from eyrie.formats.manifest import read_manifest

MEMORY_GOAL_MB = 500
WORDS = (
    "river", "market", "function", "answer", "theorem", "garden", "compile", "letter", "matrix", "engine", "history",
    "because", "although", "between", "returns", "quietly", "several", "compare", "explain", "the", "of", "and", "a",
)  # fmt: skip
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])


def rows() -> Iterator[dict[str, Any]]:
    """Rows without end, the same every time: 3.2 kB each on average; one in fifty is to be refused."""
    chance = random.Random(0)

    def text(words: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(words // 2, words * 3 // 2)))

    while True:
        kind = chance.random()
        user, answer = {"role": "user", "content": text(60)}, {"role": "assistant", "content": text(200)}
        if kind < 0.4:
            messages: Any = [user, answer, {"role": "user", "content": text(30)}, answer]
        elif kind < 0.6:
            messages = [user, {**answer, "content": f"<think>\n{text(250)}\n</think>\n\n{text(80)}"}]
        elif kind < 0.8:
            function = {"name": "look", "arguments": json.dumps({"at": text(5)})}
            call = {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": function}]}
            messages = json.dumps([user, call, {"role": "tool", "content": text(150)}, answer])
        elif kind < 0.98:
            messages = [{"from": "human", "value": text(90)}, {"from": "gpt", "value": text(300)}]
        else:
            messages = [{"role": "narrator", "content": text(20)}]
        yield {"id": chance.getrandbits(60), "messages": messages, "tools": TOOLS if 0.6 <= kind < 0.8 else None}


def write_file(path: Path, megabytes: float) -> int:
    """Write that much; rows with tools wait until a tenth of it is written. Returns the number of rows."""
    written = count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows():
            if written > megabytes * 1e6:
                return count
            if row["tools"] and written < megabytes * 1e5:
                continue
            line = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(line)
            written, count = written + len(line), count + 1
    return count


def run_once(what: str, path: Path) -> dict[str, Any]:
    """Do one measurement in this process; CPU seconds are those of the work, without imports."""
    began, error, count, kept = time.process_time(), "", 0, 0
    if what == "read":
        count = sum(1 for _ in read_jsonl(path))
    elif what == "ingest":
        out = path.parent / "s0000.jsonl.zst"
        dataset = {"adapter": "jsonl", "path": str(path), "kind": "native", "prompts_per_shard": 10**9}
        ingest({"revision": 1, "dataset": dataset, "shard": 0}, "bench", out)
        account = read_manifest(out).rows
        count, kept = account.read, account.kept
        assert count - kept == sum(1 for _ in read_jsonl(rejects_path(out)))
    else:
        import datasets

        began = time.process_time()
        try:
            for _ in datasets.load_dataset("json", data_files=str(path), split="train", streaming=True):
                count += 1
        except Exception as problem:
            error = type(problem).__name__
    used = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rows": count, "kept": kept, "cpu_s": round(used, 2), "peak_mb": round(peak), "error": error}


def measure(megabytes: float) -> dict[str, Any]:
    """All measurements on one file of this size."""
    figures: dict[str, Any] = {"megabytes": megabytes, "memory_goal_mb": MEMORY_GOAL_MB}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        figures["rows"] = write_file(path, megabytes)
        for what in ("read", "ingest", "library"):
            command = [sys.executable, __file__, "--once", what, "--path", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures[what] = json.loads(done.stdout.splitlines()[-1])
    for what in ("read", "ingest"):
        figures[what]["rows_per_cpu_s"] = round(figures[what]["rows"] / max(figures[what]["cpu_s"], 0.01))
    figures["whole"] = figures["rows"] == figures["read"]["rows"] == figures["ingest"]["rows"]
    figures["within_goal"] = figures["ingest"]["peak_mb"] < MEMORY_GOAL_MB
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=1000, help="size of the file")
    parser.add_argument("--once", choices=("read", "ingest", "library"), help="one measurement, in this process")
    parser.add_argument("--path", type=Path, help="the file for --once")
    args = parser.parse_args()
    if args.once:
        print(json.dumps(run_once(args.once, args.path)))
        return

    figures = measure(args.megabytes)
    table = Table(title=f"One JSONL file of {args.megabytes:g} MB, {figures['rows']} rows")
    for column in ("", "rows", "rows per CPU s", "peak MB", ""):
        table.add_column(column, justify="right" if column else "left")
    for label, what in (("read", "read"), ("ingest", "ingest"), ("datasets, streaming", "library")):
        done = figures[what]
        speed = str(done.get("rows_per_cpu_s", ""))
        table.add_row(label, str(done["rows"]), speed, str(done["peak_mb"]), done["error"])
    console = Console()
    console.print(table)
    verdict = "within" if figures["within_goal"] else "over"
    console.print(f"ingest's peak memory is {verdict} the goal of {MEMORY_GOAL_MB} MB")
    print(json.dumps(figures))


if __name__ == "__main__":
    run_cli(main)
