"""Programming tasks with one answer each."""

from __future__ import annotations

from eyrie.conversation import Reject
from eyrie.datasets.registry import Source
from eyrie.datasets.schema import Row, column, pair, schema


@schema(
    "opencodeinstruct",
    repo="nvidia/OpenCodeInstruct",
    subset="train",
    revision="8f3ba5bafe4d6e8db46082cf7ae6741bc370604d",
    licence="CC-BY-4.0",
    columns={
        "id": "name of the row",
        "input": "the user's text",
        "output": "the answer",
        "domain": "topic",
        "average_test_score": "share of its unit tests that the answer passes, as text",
    },
    min_score=0.0,
)
def opencodeinstruct(row: Row, source: Source) -> Row:
    """Five million tasks. Every column is text, the score too: ``min_score`` compares it as a number.

    {"id": "0c3", "input": "Reverse a string.", "output": "def reverse(s): return s[::-1]", "domain": "generic",
     "generation_algorithm": "self-instruct", "llm_judgement": "{}", "unit_tests": "[]",
     "tests_execution_status": "[]", "average_test_score": "0.9"}
    """
    lowest = source.options["min_score"]
    if lowest > 0:
        said = column(row, "average_test_score")
        try:
            score = float(said)
        except (TypeError, ValueError):
            raise Reject("malformed", f"average_test_score is {said!r}"[:80]) from None
        if not score >= lowest:
            raise Reject("low_score", str(said))
    return pair(source, column(row, "input"), column(row, "output"), task_id=row.get("id"), category=row.get("domain"))


@schema(
    "magicoder-oss",
    repo="ise-uiuc/Magicoder-OSS-Instruct-75K",
    revision="5f839b1f368a76b161028bb9edff055db34022b2",
    licence="MIT",
    columns={"lang": "programming language", "problem": "the user's text", "solution": "the answer"},
)
def magicoder_oss(row: Row, source: Source) -> Row:
    """Problems that a model invented from snippets of open-source code.

    {"lang": "python", "raw_index": 1, "index": 2, "seed": "x = 1", "openai_fingerprint": "fp",
     "problem": "Write a function that adds two numbers.", "solution": "def add(a, b): return a + b"}
    """
    return pair(source, column(row, "problem"), column(row, "solution"), category=row.get("lang"))


@schema(
    "magicoder-evol",
    repo="ise-uiuc/Magicoder-Evol-Instruct-110K",
    licence="Apache-2.0",
    columns={"instruction": "the user's text", "response": "the answer"},
)
def magicoder_evol(row: Row, source: Source) -> Row:
    """Programming instructions made harder step by step.

    {"instruction": "Write a quicksort in C.", "response": "void sort(int *a, int n) {}"}
    """
    return pair(source, column(row, "instruction"), column(row, "response"))


@schema(
    "codealpaca",
    repo="sahil2801/CodeAlpaca-20k",
    licence="see its card",
    columns={"instruction": "the task", "input": "what the task is about, often empty", "output": "the answer"},
)
def codealpaca(row: Row, source: Source) -> Row:
    """Short programming tasks; a non-empty ``input`` follows the instruction after an empty line.

    {"instruction": "Sort this list.", "input": "[3, 1, 2]", "output": "[1, 2, 3]"}
    """
    asked, about = column(row, "instruction"), row.get("input")
    if isinstance(asked, str) and isinstance(about, str) and about.strip():
        asked = f"{asked}\n\n{about}"
    return pair(source, asked, column(row, "output"))


@schema(
    "opc",
    repo="OpenCoder-LLM/opc-sft-stage1",
    subset="filtered_infinity_instruct",
    licence="MIT",
    columns={"instruction": "the user's text", "output": "the answer"},
)
def opc(row: Row, source: Source) -> Row:
    """OpenCoder's first fine-tuning stage; ``subset`` chooses among its three parts.

    {"instruction": "Explain a hash map.", "output": "It maps keys to values."}
    """
    return pair(source, column(row, "instruction"), column(row, "output"))
