"""What the client of the served engines costs: throughput, CPU, memory, and how far it overshoots a token budget.

A server of ours answers at a fixed rate, a token every four milliseconds and row, so that answers of 5 to 200 tokens
take 20 to 800 ms. The whole generate stage runs against it with prompts that need no tokenizer: budget, requests,
journal. Throughput is held against the ideal: the same answers, in order, through as many slots with no cost in
between. The last line is one JSON object. `--kills 50` instead kills a workflow that answers through a server of its
own: its server, its job and Snakemake itself in turn, at random moments.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import heapq
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from eyrie.bench.stage import machine
from eyrie.config import Engine as Options
from eyrie.engines.base import Answer, Request
from eyrie.engines.http import HttpEngine
from eyrie.engines.sglang import SglangWire
from eyrie.errors import run_cli
from eyrie.formats.jsonl import write_jsonl
from eyrie.formats.manifest import RowCounts, read_manifest
from eyrie.formats.publish import publish, write_json
from eyrie.generate.stage import generate
from eyrie.render.renderer import TurnRow
from eyrie.targets.card import TargetCard

MAX_TOKENS, TOKEN_SECONDS, PROMPT_TOKENS = 200, 0.004, 60
STOP = 2
# concurrency -> rows that its budget holds; about twenty seconds each, and one with a small budget for its concurrency
SIZES = {"1": (1, 50), "16": (16, 800), "64": (64, 3_200), "256": (256, 10_000), "256, small budget": (256, 1_000)}


def length_of(row: int) -> int:
    """Tokens of the answer to prompt ``row``: 5 to 200, all equally likely."""
    return 5 + int.from_bytes(hashlib.sha256(str(row).encode()).digest()[:4], "little") % (MAX_TOKENS - 4)


class Server(asyncio.Protocol):
    """Just enough HTTP to answer ``/generate``, as cheaply as Python can: the client is what is measured."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.held = transport, b""

    def data_received(self, data: bytes) -> None:
        self.held += data
        head, found, body = self.held.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"GET"):
            self.held = b""
            return self.send({"version": "fixed rate"})
        size = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
        if len(body) < size:
            return None
        self.held = b""
        request = json.loads(body)
        ids, most = request["input_ids"], request["sampling_params"]["max_new_tokens"]
        count = min(length_of(ids[0]), most)
        meta = {"finish_reason": {"type": "stop", "matched": STOP}, "prompt_tokens": len(ids), "cached_tokens": 0}
        answer = {"text": "", "output_ids": [*range(1000, 999 + count), STOP], "meta_info": meta}
        asyncio.get_running_loop().call_later(count * TOKEN_SECONDS, self.send, answer)
        return None

    def send(self, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.transport.write(head + body)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


class Plain:
    """Prompts whose first id is the row's number; no tokenizer is measured."""

    def prompt_ids(self, messages: list[dict[str, Any]], tools: Any = None) -> list[int]:
        return [int(messages[-1]["content"]), *range(1000, 999 + PROMPT_TOKENS)]

    def decode(self, ids: list[int]) -> str:
        return ""

    def last_turn(self, messages: Any, tools: Any = None) -> TurnRow:
        raise NotImplementedError


class Timed:
    """An engine that notes wall and CPU seconds, what was bought, and resident memory on the way."""

    def __init__(self, engine: HttpEngine, rows: int) -> None:
        self.engine, self.rows = engine, rows
        self.bought, self.answers, self.memory = 0, 0, [0.0, 0.0]

    def answer(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        def noted(request: Request, answer: Answer) -> None:
            finished(request, answer)
            self.bought += len(answer.output_ids)
            self.answers += 1
            if self.answers == max(1, self.rows // 5):
                self.memory[0] = resident()

        wall, cpu = time.perf_counter(), time.process_time()
        self.engine.answer(requests, noted)
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu
        self.memory[1] = resident()


def resident() -> float:
    """Resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def ideal_seconds(rows: int, slots: int) -> float:
    """How long ``rows`` answers take through ``slots`` slots when nothing else costs time."""
    ends = [0.0] * slots
    for row in range(rows):
        heapq.heapreplace(ends, ends[0] + length_of(row) * TOKEN_SECONDS)
    return max(ends)


def measure(root: Path, url: str, concurrency: int, rows: int) -> dict[str, Any]:
    """Fill a budget of ``rows`` answers at one concurrency."""
    prompts, target, out = root / "set" / "s0000.jsonl.zst", root / "target.json", root / "out" / "s0000.jsonl.zst"
    offered = rows + rows // 4 + 2 * concurrency
    with publish(prompts, stage="ingest", recipe={}) as draft:
        write_jsonl(draft.path, ({"id": f"{n:016x}", "messages": [{"role": "user", "content": str(n)}]}
                                 for n in range(offered)))  # fmt: skip
        draft.rows = RowCounts(read=offered, kept=offered)
    ones = dict.fromkeys(
        ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "vocab_size"), 1,
    )  # fmt: skip
    card = TargetCard(
        model="m", architecture="a", model_type="t", rms_norm_eps=1e-5, rope_theta=1e4, tied_embeddings=True,
        dtype="bfloat16", max_position_embeddings=4096, stop_ids=[STOP], special_ids=[STOP], target="t", tokenizer="t",
        template="t", **ones,
    )  # fmt: skip
    write_json(target, card.model_dump())
    budget = sum(map(length_of, range(rows)))
    engine = Timed(HttpEngine(SglangWire(frozenset({STOP})), [url], concurrency=concurrency), rows)
    generate(
        {"revision": 1, "engine": {"kind": "sglang"}, "sampling": {"max_tokens": MAX_TOKENS}, "token_budget": budget},
        prompts=prompts, target=target, model="m", out=out, journal=root / "journal" / "set" / "s0000.jsonl",
        options=Options(kind="sglang", urls=(url,)), engine=lambda: engine, renderer=Plain(),
    )  # fmt: skip
    held = read_manifest(out).tokens["completion"]
    ideal = ideal_seconds(engine.answers, concurrency)
    return {
        "concurrency": concurrency,
        "rows": engine.answers,
        "seconds": round(engine.wall, 2),
        "ideal_seconds": round(ideal, 2),
        "of_ideal": round(ideal / engine.wall, 3),
        "rows_per_s": round(engine.answers / engine.wall, 1),
        "cpu_s_per_1000_rows": round(1000 * engine.cpu / engine.answers, 3),
        "core_share": round(engine.cpu / engine.wall, 3),
        "memory_growth_mb": round(engine.memory[1] - engine.memory[0], 1),
        "overshoot": round((engine.bought - held) / budget, 4),
    }


def kills(count: int) -> None:
    """Kill a workflow, its job and its server in turn, ``count`` times, and say what was lost, doubled or left."""
    from tests.workflow.kill_run import KillRun

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = KillRun(Path(folder), count)
        figures = run.disturb(count)
    times = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures |= {"seconds": round(time.perf_counter() - began), "cpu_seconds": round(times.ru_utime + times.ru_stime)}
    Console().print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in figures.items()))
    print(json.dumps(figures))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows: 1 is 10,000 at concurrency 256")
    parser.add_argument("--kills", type=int, default=0, help="kill a workflow so many times instead of measuring")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return asyncio.run(serve())
    if args.kills:
        return kills(args.kills)
    child = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = f"http://127.0.0.1:{int(child.stdout.readline())}"
        figures = {}
        for label, (concurrency, rows) in SIZES.items():
            with tempfile.TemporaryDirectory() as folder:
                figures[label] = measure(Path(folder), url, concurrency, max(concurrency, int(rows * args.scale)))
    finally:
        child.kill()
        child.wait()
    table = Table(title="The client of the served engines")
    columns = ("rows", "rows_per_s", "of_ideal", "core_share", "cpu_s_per_1000_rows", "memory_growth_mb", "overshoot")
    for column in ("concurrency", *columns):
        table.add_column(column.replace("_", " "), justify="right")
    for label, row in figures.items():
        table.add_row(label, *(str(row[column]) for column in columns))
    Console().print(table)
    print(json.dumps({"runs": figures, "machine": machine(1)}))
    return None


if __name__ == "__main__":
    run_cli(main)
