"""Tokenize and mask native conversations: against encoding the same texts and nothing else, and against SpecForge.

One process, one thread, rounds interleaved; every round has conversations of its own, so that nothing is remembered
from the round before. Three contestants: `encode`, the tokenizer's own call on each conversation's finished text, once;
Eyrie, which makes one row per assistant turn, each with its context as served; SpecForge's `preprocess_conversations`
(one row per conversation), when --specforge names the site-packages folder of a virtual environment that holds it.
speculators tokenizes conversations through a live server and has no column. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
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
from eyrie.errors import run_cli
from eyrie.render import Renderer, TurnRow

TURNS = (1, 4, 8)
QUESTION_WORDS, ANSWER_WORDS = 90, 260
NEW_WORDS = 1 / 25  # of words; with punctuation and numbers that is 3.4% of the pieces that a tokenizer encodes
TYPOGRAPHIC = 1 / 10  # messages that hold a sign beyond ASCII

WORDS = (  # noqa: SIM905
    "the a of to and in is that it for with as on be this are by an or from at which one have not has but they will "
    "can more when there all were would about into than its time only some could these two may first then do any like "
    "such new other over also after most made people between must through where much before right being still water "
    "number order market history result problem question compile function variable iterate parameter interest station "
    "bicycle temperature extraordinarily consequently approximately understanding configuration responsibility"
).split()
CODE = (
    "for i in range(10):\n    print(i)\n",
    "return {'key': value[0]}\n",
    "x = f(y) + 3.14159\n",
    "- item one\n- item two\n",
)

Talk = list[dict[str, str]]


def word(rng: random.Random) -> str:
    """A common word, or a new one, as often as real prose has words that the shard did not have before (3.4%)."""
    if rng.random() > NEW_WORDS:
        return rng.choice(WORDS)
    return "".join(rng.choice("bcdfghklmnprstvw") + rng.choice("aeiou") for _ in range(rng.randint(2, 5)))


def prose(rng: random.Random, words: int) -> str:
    """Sentences, with numbers, code and paragraphs here and there."""
    parts: list[str] = []
    while words > 0:
        length = min(words, rng.randint(5, 18))
        words -= length
        sentence = " ".join(word(rng) for _ in range(length)).capitalize()
        parts.append(
            sentence + rng.choice((". ", ", ", "? ", f" {rng.randint(1, 9999)}. ", ".\n\n", f":\n{rng.choice(CODE)}"))
        )
    text = "".join(parts).strip()
    return text.replace(" the ", " \u2014 the ", 2) if rng.random() < TYPOGRAPHIC else text


def talks(seed: int, count: int, turns: int) -> list[Talk]:
    """Conversations that occur in no other round."""
    rng = random.Random(f"{seed}/{turns}")
    pair = (("user", QUESTION_WORDS), ("assistant", ANSWER_WORDS))
    return [
        [{"role": role, "content": prose(rng, words)} for _ in range(turns) for role, words in pair]
        for _ in range(count)
    ]


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


def measure(model: Path, specforge: Path | None, count: int, rounds: int) -> dict[str, Any]:
    """Conversations per CPU second of each contestant, by turns per conversation."""
    torch.set_num_threads(1)
    renderer = Renderer(str(model))
    other = specforge_function(specforge, renderer) if specforge else None
    found: dict[str, Any] = {}
    for turns in TURNS:
        size = max(4, count // turns)
        speeds: dict[str, list[float]] = {"encode": [], "eyrie": [], **({"specforge": []} if other else {})}
        tokens = rows = 0
        for number in range(-1, rounds):  # the first round warms up
            batch = talks(number, size, turns)
            texts = [renderer.render(talk, None, generation=False) for talk in batch]
            contestants: dict[str, Callable[[], Any]] = {
                "encode": lambda t=texts: [renderer.tokenizer.encode(text, add_special_tokens=False) for text in t],
                "eyrie": lambda b=batch: [row for talk in b for row in renderer.turn_rows(talk)],
                **({"specforge": lambda b=batch: other(b)} if other else {}),
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
        found[str(turns)] = {
            "per_second": {name: Spread.of(values).to_json() for name, values in speeds.items()},
            "eyrie_over": ratios,
            "conversations": size,
            "rows": rows,
            "row_tokens": tokens,
        }
    return {"turns": found, "rounds": rounds, "specforge": "0.2.0" if other else None, "machine": machine(1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("data/targets/smollm2-135m"), help="Hugging Face folder")
    parser.add_argument("--specforge", type=Path, help="site-packages folder that holds specforge 0.2.0")
    parser.add_argument(
        "--conversations", type=int, default=160, help="conversations per round, divided by their turns"
    )
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds")
    args = parser.parse_args()

    figures = measure(args.model, args.specforge, args.conversations, args.rounds)
    table = Table(title="Conversations per CPU second (median; lowest to highest)")
    for column in ("turns", "encode alone", "eyrie", "specforge", "eyrie / encode", "eyrie / specforge"):
        table.add_column(column, justify="right")
    for turns, found in figures["turns"].items():
        cells = [
            f"{speed['median']:.1f} ({speed['low']:.1f} to {speed['high']:.1f})" if speed else "-"
            for speed in map(found["per_second"].get, ("encode", "eyrie", "specforge"))
        ]
        ratios = [f"{found['eyrie_over'].get(name, float('nan')):.2f}" for name in ("encode", "specforge")]
        table.add_row(turns, *cells, *(ratio.replace("nan", "-") for ratio in ratios))
    console = Console()
    console.print(table)
    if args.specforge is None:
        console.print("specforge was not given (--specforge), so its column is empty")
    console.print("speculators needs a live server to tokenize conversations and is left out")
    print(json.dumps(figures))


if __name__ == "__main__":
    run_cli(main)
