"""The merge at scale: CPU seconds and peak memory over synthetic token shards, and the draft vocabulary from bare ids.

Rows have prompts of about fifty words; datasets share prompts, one has a cap, and an external suite shares word runs
with the data, so that every rule of the merge has work. The merge runs in a process of its own, once over a quarter of
the shards and once over all. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.console import Console
from rich.table import Table

from eyrie.datasets import Source, adapter
from eyrie.errors import run_cli
from eyrie.formats.manifest import RowCounts
from eyrie.formats.publish import publish, write_json
from eyrie.formats.tokens import token_schema
from eyrie.merge import merge
from eyrie.merge.vocabulary import add_counts, choose
from eyrie.targets.card import TargetCard

DATASETS = ("code", "chat", "writing", "tools")
VOCAB_SIZE, DRAFT_VOCAB_SIZE = 163_840, 32_000
ROWS_PER_SHARD = 4_000
WORDS_PER_PROMPT, PROMPT_TOKENS, ANSWER_TOKENS = 50, 60, 100  # means
SUITE_PROMPTS = 1_000


def card() -> TargetCard:
    facts: dict[str, Any] = dict.fromkeys(
        ("num_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 64
    )
    return TargetCard(
        model="synthetic", architecture="none", model_type="none", vocab_size=VOCAB_SIZE, rms_norm_eps=1e-5,
        rope_theta=1e4, max_position_embeddings=4096, tied_embeddings=False, dtype="bfloat16",
        stop_ids=[VOCAB_SIZE - 1], special_ids=list(range(VOCAB_SIZE - 256, VOCAB_SIZE)), target="0" * 64,
        tokenizer="0" * 64, template="0" * 64, **facts,
    )  # fmt: skip


def token_ids(rng: np.random.Generator, count: int) -> np.ndarray:
    """int32 ``[count]``: frequent ids are frequent, as in text (Zipf)."""
    return (VOCAB_SIZE ** rng.random(count)).astype(np.int32) - 1


@cache
def lexicon() -> list[str]:
    """Fifty thousand words."""
    rng = np.random.default_rng(0)
    letters = (rng.integers(0, 26, (50_000, 10)) + ord("a")).tolist()
    return [bytes(word[:size]).decode() for word, size in zip(letters, rng.integers(2, 10, 50_000), strict=True)]


def texts(rng: np.random.Generator, count: int) -> list[str]:
    """About fifty words each, frequent ones frequent."""
    words = lexicon()
    sizes = rng.poisson(WORDS_PER_PROMPT, count) + 1
    drawn = iter((len(words) ** rng.random(int(sizes.sum()))).astype(np.int64) - 1)
    return [" ".join(words[next(drawn)] for _ in range(size)) for size in sizes]


@cache
def suite_texts() -> list[str]:
    return texts(np.random.default_rng(0), SUITE_PROMPTS)


@cache
def common_texts() -> list[str]:
    return texts(np.random.default_rng(1), SUITE_PROMPTS)


def prompts(rng: np.random.Generator, count: int) -> list[str]:
    """Prompts of rows: one in 500 quotes the suite, one in 200 a text that other rows quote too."""
    made = texts(rng, count)
    for first, step, quoted in ((0, 500, suite_texts()), (7, 200, common_texts())):
        for row in range(first, count, step):
            made[row] += " " + quoted[int(rng.integers(len(quoted)))]
    return made


def make_shard(folder: Path, number: int, rows: int) -> Path:
    """One token shard; every twentieth prompt is also one of the dataset beside it."""
    rng = np.random.default_rng(number)
    prompt = rng.poisson(PROMPT_TOKENS, rows) + 1
    answer = rng.poisson(ANSWER_TOKENS, rows) + 1
    length = prompt + answer
    ids = pl.DataFrame({"row": np.repeat(np.arange(rows), length), "id": token_ids(rng, int(length.sum()))})
    span = pl.struct(start=pl.col("start"), end=pl.col("end"))
    shared = number // len(DATASETS)
    keys = [f"{shared if row % 20 == 0 else number + 2**20:08x}{row:08x}" for row in range(rows)]
    frame = pl.DataFrame({
        "row_id": [f"{number:08x}{row:08x}:1" for row in range(rows)],
        "conversation": [f"{number:08x}{row:08x}" for row in range(rows)],
        "prompt_key": keys,
        "turn": np.ones(rows, np.int32),
        "input_ids": ids.group_by("row", maintain_order=True).agg("id")["id"],
        "spans": pl.DataFrame({"start": prompt, "end": length}).cast(pl.Int32).select(pl.concat_list(span)).to_series(),
        "length": length,
        "completion_tokens": answer,
        "finish_reason": ["stop"] * rows,
        "asked": [[text] for text in prompts(rng, rows)],
    })  # fmt: skip
    path = folder / "tokens" / DATASETS[number % len(DATASETS)] / f"s{number // len(DATASETS):04d}.parquet"
    with publish(path, stage="tokenize", recipe={}, identity=card().identity()) as draft:
        frame.cast(token_schema()).write_parquet(draft.path, compression="zstd", statistics=False)
        draft.rows = RowCounts(read=rows, kept=rows)
    return path


def suite(source: Source) -> Iterator[dict[str, Any]]:
    for text in suite_texts():
        yield {"messages": [{"role": "user", "content": text}]}


def peak_mb() -> int:
    """The most memory that this process held; ``getrusage`` would count what its parent held when it was started."""
    status = Path("/proc/self/status").read_text()
    return round(int(status.split("VmHWM:")[1].split()[0]) / 1024)


def run(folder: Path, paths: list[Path], cap: int, answer: Any) -> None:
    """The merge alone, in a process of its own."""
    adapter("synthetic-suite")(suite)
    recipe = {
        "merge": {"draft_vocab_size": DRAFT_VOCAB_SIZE},
        "datasets": [[name, 1.0] for name in DATASETS],
        "caps": {DATASETS[1]: cap},
        "suites": {"synthetic": {"dataset": "synthetic-suite"}},
    }
    before, began = peak_mb(), time.process_time()
    merge(recipe, target=folder / "target.json", tokens=paths, out=folder / "merged")
    answer.put({
        "cpu_seconds": round(time.process_time() - began, 2),
        "peak_mb": peak_mb(),
        "start_mb": before,
    })  # fmt: skip


def apart(folder: Path, paths: list[Path], cap: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    worker = context.Process(target=run, args=(folder, paths, cap, answer))
    worker.start()
    figures: dict[str, Any] = answer.get()
    worker.join()
    summary = json.loads((folder / "merged" / "summary.json").read_text())
    return {**figures, "rows": summary["rows"], "left_out": summary["left_out"]}


def vocabulary(ids: int) -> dict[str, Any]:
    """CPU seconds from bare ids to the draft vocabulary; making the ids is not counted."""
    rng = np.random.default_rng(0)
    block = token_ids(rng, min(ids, 10_000_000))
    counts, spent, left = np.zeros(VOCAB_SIZE, np.int64), 0.0, ids
    while left:
        part = np.roll(block, left)[:left]
        began = time.process_time()
        add_counts(counts, part)
        spent += time.process_time() - began
        left -= len(part)
    began = time.process_time()
    chosen = choose(counts, DRAFT_VOCAB_SIZE, card())
    spent += time.process_time() - began
    return {"ids": int(counts.sum()), "size": len(chosen.ids), "cpu_seconds": round(spent, 2)}


def measure(rows: int, ids: int, folder: Path) -> dict[str, Any]:
    from eyrie.bench.stage import machine  # not above: it brings torch, which the merge does without

    write_json(folder / "target.json", card().model_dump())
    per_shard = max(1, min(ROWS_PER_SHARD, rows // (4 * len(DATASETS))))
    sizes = [per_shard] * (rows // per_shard)
    paths = [make_shard(folder, number, size) for number, size in enumerate(sizes)]
    cap = sum(sizes) // len(DATASETS) * ANSWER_TOKENS // 2
    return {
        "quarter": apart(folder, paths[: max(len(DATASETS), len(paths) // 4)], cap // 4),
        "whole": apart(folder, paths, cap),
        "shards": len(paths),
        "shard_bytes": sum(path.stat().st_size for path in paths),
        "vocabulary": vocabulary(ids),
        "machine": machine(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="token rows to merge (about 1 GB of disk)")
    parser.add_argument("--ids", type=int, default=100_000_000, help="token ids for the draft vocabulary")
    parser.add_argument("--folder", type=Path, help="where the shards are made; default: a temporary folder")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = measure(args.rows, args.ids, Path(folder))
    table = Table(title="Merge")
    for column in ("", "rows read", "rows kept", "CPU s", "peak MB", "of it at the start"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("quarter", "whole"):
        part = figures[name]
        table.add_row(
            name, f"{part['rows']['read']:,}", f"{part['rows']['kept']:,}", f"{part['cpu_seconds']:.1f}",
            f"{part['peak_mb']:,}", f"{part['start_mb']:,}",
        )  # fmt: skip
    console = Console()
    console.print(table)
    chosen = figures["vocabulary"]
    console.print(f"{chosen['size']:,} draft tokens from {chosen['ids']:,} ids: {chosen['cpu_seconds']:.2f} CPU s")
    print(json.dumps(figures))


if __name__ == "__main__":
    run_cli(main)
