"""Every published schema: its docstring's row is kept, and becomes exactly what it should."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from eyrie.conversation import Conversation, Reject, normalise
from eyrie.datasets import ADAPTERS, find_adapter

SCHEMAS = sorted(name for name, adapter in ADAPTERS.items() if adapter.licence)
ROOT = Path(__file__).parents[2]


def shown_row(name: str) -> dict[str, Any]:
    """The row that the adapter's docstring shows."""
    text = ADAPTERS[name].read.__doc__ or ""
    row, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    return dict(row)


def read(name: str, rows: list[dict[str, Any]], folder: Path, kind: Any = "native", **options: Any) -> list[Any]:
    """Conversations, or the reasons of the rows that were refused."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made: list[Any] = []
    for raw in find_adapter(name).open(options, kind, str(path)):
        try:
            if isinstance(raw, Reject):
                raise raw
            made.append(normalise(raw))
        except Reject as reject:
            made.append(reject.reason)
    return made


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in conversation.messages]


def call(id: str | None, name: str, **arguments: Any) -> dict[str, Any]:
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": id, **made} if id else made


# What the row that each docstring shows becomes in a native dataset: roles and texts.
GOLDEN: dict[str, list[tuple[str, str]]] = {
    "deepswe-kimi-k2": [
        ("system", "You are a programming agent."),
        ("user", "Fix the failing test in utils.py."),
        ("assistant", "I look first.\n<function=view>utils.py</function>"),
        ("user", "1: def half(x): return x / 3"),
        ("assistant", "<function=edit>return x / 2</function>"),
    ],
    "hermes-kimi": [
        ("system", "You may call functions."),
        ("user", "How many notes are there?"),
        ("assistant", ""),
        ("tool", '["a.md", "b.md"]'),
        ("assistant", "There are two notes."),
    ],
    "kimi-k2.5-million": [("user", "Why is the sky blue?"), ("assistant", "Short waves scatter more.")],
    "kimi-reasoning-traces": [("user", "What is 6 times 7?"), ("assistant", "42")],
    "opencodeinstruct": [("user", "Reverse a string."), ("assistant", "def reverse(s): return s[::-1]")],
    "magicoder-oss": [
        ("user", "Write a function that adds two numbers."),
        ("assistant", "def add(a, b): return a + b"),
    ],
    "magicoder-evol": [("user", "Write a quicksort in C."), ("assistant", "void sort(int *a, int n) {}")],
    "codealpaca": [("user", "Sort this list.\n\n[3, 1, 2]"), ("assistant", "[1, 2, 3]")],
    "opc": [("user", "Explain a hash map."), ("assistant", "It maps keys to values.")],
    "glaive": [
        ("user", "How long is 'it's'?"),
        ("assistant", ""),
        ("tool", '{"length": 4}'),
        ("assistant", "Four characters."),
    ],
    "mixture-of-thoughts": [("user", "Add 1 and 2."), ("assistant", "Three.")],
    "openthoughts": [
        ("system", "Answer with a thought and a solution section."),
        ("user", "Add 1 and 2."),
        ("assistant", "Three."),
    ],
    "openthoughts3": [("user", "Add 1 and 2."), ("assistant", "Three.")],
    "gsm8k": [
        ("user", "Two bags hold 3 apples each. How many apples?"),
        ("assistant", "2*3 = <<2*3=6>>6\n#### 6"),
    ],
    "hendrycks-math": [("user", "Solve $x+1=3$."), ("assistant", "$x=2$.")],
    "math-qa": [("user", "What is 2 + 2?\na ) 3 , b ) 4"), ("assistant", "2 + 2 = 4, answer b.")],
    "sciq": [("user", "What gas do plants take in?"), ("assistant", "carbon dioxide")],
    "camel": [("user", "What is a lens?"), ("assistant", "A piece of glass that bends light.")],
    "ultrachat": [
        ("user", "Name a fruit."),
        ("assistant", "Apple."),
        ("user", "Another."),
        ("assistant", "Pear."),
    ],
    "sharegpt": [("user", "Tell me another."), ("assistant", "Once there was a hen.")],
    "perfectblend": [("user", "Name a river."), ("assistant", "The Rhine.")],
    "magpie": [("user", "What is salt?"), ("assistant", "NaCl.")],
    "infinity": [("user", "Name a metal."), ("assistant", "Iron.")],
    "nemotron-chat": [("user", "Name a bird."), ("assistant", "A crow.")],
    "swe-agent": [
        ("system", "SETTING: a shell."),
        ("user", "Fix issue 1."),
        ("assistant", "I open the file.\n```\nopen a.py\n```"),
        ("user", "[File: a.py]"),
    ],
    "swe-smith": [("user", "Fix it."), ("assistant", "I look."), ("tool", "a.py"), ("user", "Go on.")],
    "coderforge": [("user", "Fix it."), ("assistant", "Done.")],
    "swe-smith-mini": [
        ("system", "Answer with one command."),
        ("user", "Fix it."),
        ("assistant", "ls"),
        ("user", "a.py"),
    ],
}
TWINS = {
    "deepswe-kimi-k2-sampled": "deepswe-kimi-k2",
    "octomed-kimi": "kimi-k2.5-million",
    "eaglechat": "perfectblend",
    "openhands-sft": "swe-smith-mini",
}
REASONING = {
    "hermes-kimi": ["I list them.", "Two."],
    "kimi-k2.5-million": ["Scattering."],
    "kimi-reasoning-traces": ["Six sevens."],
    "mixture-of-thoughts": ["One and two."],
    "openthoughts": ["One and two."],
    "openthoughts3": ["One and two."],
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_row_that_the_docstring_shows(name: str, tmp_path: Path) -> None:
    (made,) = read(name, [shown_row(name)], tmp_path)
    assert turns(made) == GOLDEN[TWINS.get(name, name)]
    thoughts = [message.reasoning for message in made.messages if message.reasoning]
    assert thoughts == REASONING.get(TWINS.get(name, name), [])


@pytest.mark.parametrize("name", SCHEMAS)
def test_an_answered_dataset_ends_with_the_question(name: str, tmp_path: Path) -> None:
    (made,) = read(name, [shown_row(name)], tmp_path, "answered")
    asked = [text for role, text in GOLDEN[TWINS.get(name, name)] if role == "user"]
    assert made.as_prompt().messages[-1].content == asked[-1]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_entry_says_where_its_data_stands_and_what_it_reads(name: str, tmp_path: Path) -> None:
    entry = ADAPTERS[name]
    assert entry.hub.repo
    assert entry.hub.split
    assert entry.places == ("path", "repo")
    listed = (ROOT / "data" / "README.md").read_text()
    assert f"| `{name}` | `{entry.hub.repo}`" in listed, "name it in data/README.md"
    # A row that holds nothing of what the entry reads is refused by name, and the refusal remembers the row.
    (empty,) = find_adapter(name).open({}, "native", str(_file(tmp_path, {"unrelated": 1})))
    assert isinstance(empty, Reject)
    assert empty.reason == "malformed"
    assert empty.row == {"unrelated": 1}


def _file(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_deepswe_says_who_answered(tmp_path: Path) -> None:
    (made,) = read("deepswe-kimi-k2", [shown_row("deepswe-kimi-k2")], tmp_path)
    assert made.meta == {"generator": "kimi-k2"}


def test_hermes_calls_have_ids_and_their_results_name_them(tmp_path: Path) -> None:
    (made,) = read("hermes-kimi", [shown_row("hermes-kimi")], tmp_path)
    assert made.messages[2].tool_calls == [call("functions.ls:0", "ls", path="notes")]
    assert (made.messages[3].tool_call_id, made.messages[3].name) == ("functions.ls:0", "ls")
    assert made.tools == [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
    assert made.meta == {"generator": "kimi-k2.5", "task_id": "a1", "category": "files"}


def hermes(*texts: tuple[str, str]) -> dict[str, Any]:
    turns = [{"from": role, "value": text} for role, text in (("human", "Go."), *texts)]
    return {"id": "x", "conversations": turns, "tools": "[]", "category": "c"}


def test_hermes_counts_calls_over_the_conversation_and_splits_results(tmp_path: Path) -> None:
    two = '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    results = "<tool_response>\n1\n</tool_response>\n<tool_response>2</tool_response>"
    row = hermes(("gpt", f"Both.\n{two}"), ("tool", results), ("gpt", two), ("tool", results), ("gpt", "Done."))
    (made,) = read("hermes-kimi", [row], tmp_path)
    assert [c["id"] for m in made.messages for c in m.tool_calls or []] == [
        "functions.a:0", "functions.b:1", "functions.a:2", "functions.b:3",
    ]  # fmt: skip
    assert [(m.content, m.tool_call_id) for m in made.messages if m.role == "tool"] == [
        ("1", "functions.a:0"), ("2", "functions.b:1"), ("1", "functions.a:2"), ("2", "functions.b:3"),
    ]  # fmt: skip
    assert made.messages[1].content == "Both."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("thought</think>answer", ("thought", "answer")),
        ('<think>thought<tool_call>{"name": "a"}</tool_call>', ("thought", "")),
        ("<think>thought without end", "unpaired_markers"),
        ("<think>a</think>b</think>c", "unpaired_markers"),
        ('<tool_call>{"name": "a"}', "unpaired_markers"),
        ("a</tool_call>", "unpaired_markers"),
        ("<tool_call>{'name': 'a'}</tool_call>", "bad_json"),
        ('<tool_call>{"name": "a"}</tool_call> and more', "malformed"),
        ("<tool_call>[1]</tool_call>", "malformed"),
    ],
)
def test_hermes_text_is_split_as_where_no_parser_ran(text: str, expected: Any, tmp_path: Path) -> None:
    (made,) = read("hermes-kimi", [hermes(("gpt", text))], tmp_path)
    if isinstance(expected, tuple):
        made = (made.messages[1].reasoning, made.messages[1].content)
    assert made == expected


SYSTEM = "SYSTEM: You are a helpful assistant, with no access to external functions."


def glaive(chat: str, system: str = SYSTEM) -> dict[str, Any]:
    return {"system": system, "chat": chat}


def test_glaive_arguments_in_single_quotes(tmp_path: Path) -> None:
    (made,) = read("glaive", [shown_row("glaive")], tmp_path)
    assert made.messages[1].tool_calls == [call("functions.count:0", "count", text="it's")]
    assert (made.messages[2].tool_call_id, made.messages[2].name) == ("functions.count:0", "count")
    assert made.tools == [
        {
            "type": "function",
            "function": {"name": "count", "description": "Count letters", "parameters": {"type": "object"}},
        }
    ]
    assert not [message for message in made.messages if "<|endoftext|>" in message.content]


def test_glaive_variants(tmp_path: Path) -> None:
    bare = '<functioncall> {"name": "f", "arguments": {"a": 1}} <|endoftext|>'
    after = 'Let me look.\n<functioncall> {"name": "f", "arguments": \'{}\'} <|endoftext|>'
    rows = [
        glaive("USER: 2+2?\n\nASSISTANT: 4. <|endoftext|>\n\n"),
        glaive(f"USER: go\n\n\nASSISTANT: {bare}\n\n\nFUNCTION RESPONSE: 1\n\n\nASSISTANT: One. <|endoftext|>"),
        glaive(f"USER: go\n\n\nASSISTANT: {after}"),
        glaive("USER: Write a play.\n\n\nASSISTANT: A man:\nUSER: no marker, in the middle of a text <|endoftext|>"),
        glaive("USER: a\n\n\nASSISTANT: b <|endoftext|>USER: c\n\n\nASSISTANT: d <|endoftext|>"),
    ]
    two, call_bare, preamble, play, glued = read("glaive", rows, tmp_path)
    said = SYSTEM.removeprefix("SYSTEM: ")
    assert turns(two) == [("system", said), ("user", "2+2?"), ("assistant", "4.")]
    assert two.tools is None
    assert call_bare.messages[2].tool_calls == [call("functions.f:0", "f", a=1)]
    assert (preamble.messages[2].content, preamble.messages[2].tool_calls) == (
        "Let me look.",
        [call("functions.f:0", "f")],
    )
    assert [m.role for m in play.messages] == ["system", "user", "assistant"]
    assert [m.content for m in glued.messages[1:]] == ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (glaive("USER: x\n\nASSISTANT: <functioncall> {\"name\": \"f\", \"arguments\": '{broken'} "), "bad_json"),
        (glaive("USER: x\n\nASSISTANT: <functioncall> {\"name\": f, \"arguments\": '{}'}"), "bad_json"),
        (glaive("USER: x\n\n\nFUNCTION RESPONSE: 1"), "bad_order"),
        (glaive("hello USER: x"), "malformed"),
        (glaive("USER: x", 'SYSTEM: Use -\n{"name": "f"'), "bad_json"),
        (glaive(""), "no_user_turn"),
        ({"system": 1, "chat": "USER: x"}, "malformed"),
    ],
)  # fmt: skip
def test_glaive_rows_that_are_refused(row: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert read("glaive", [row], tmp_path) == [reason]


def test_sharegpt_fragments(tmp_path: Path) -> None:
    def row(*pairs: tuple[str, str]) -> dict[str, Any]:
        return {"id": "a", "conversations": [{"from": role, "value": text} for role, text in pairs]}

    made = read(
        "sharegpt",
        [
            row(("gpt", "x"), ("gpt", "y"), ("human", "q"), ("bing", "a")),
            row(("gpt", "x"), ("bard", "y")),
            row(),
            row(("system", "s")),
            row(("human", "q"), ("chatgpt", "a"), ("narrator", "b")),
        ],
        tmp_path,
    )
    assert turns(made[0]) == [("user", "q"), ("assistant", "a")]
    assert made[1:] == ["no_user_turn", "no_user_turn", "no_user_turn", "unknown_role"]


def test_trajectories_may_be_json_strings_with_parts(tmp_path: Path) -> None:
    shown = shown_row("swe-smith")
    broken = {**shown, "messages": shown["messages"][:-3]}
    made = read("swe-smith", [shown, {**shown, "messages": json.loads(shown["messages"])}, broken], tmp_path)
    assert made[0] == made[1]
    assert made[0].messages[1].tool_calls == [call("c1", "bash", cmd="ls")]
    assert made[0].messages[2].tool_call_id == "c1"
    assert made[2] == "bad_json"


def test_broken_tools_reject_the_row_rather_than_leave_it_without_tools(tmp_path: Path) -> None:
    shown = shown_row("coderforge")
    made = read("coderforge", [shown, {**shown, "tools": "[{"}], tmp_path)
    assert made[0].tools == [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    assert made[1] == "bad_json"


def test_scores_are_compared_as_numbers(tmp_path: Path) -> None:
    shown = shown_row("opencodeinstruct")
    rows = [{**shown, "average_test_score": score} for score in ("1", "0.9", "0.95", "nan", "?")]
    made = read("opencodeinstruct", rows, tmp_path, min_score=0.95)
    assert [m if isinstance(m, str) else "kept" for m in made] == [
        "kept", "low_score", "kept", "low_score", "malformed",
    ]  # fmt: skip
    assert len([m for m in read("opencodeinstruct", rows, tmp_path) if not isinstance(m, str)]) == 5


def test_openthoughts_system_text_can_be_left_out(tmp_path: Path) -> None:
    (made,) = read("openthoughts", [shown_row("openthoughts")], tmp_path, system="drop")
    assert made.messages[0].role == "user"
    row = shown_row("openthoughts")
    row["conversations"][1]["value"] = "<|begin_of_thought|> a"
    assert read("openthoughts", [row], tmp_path) == ["unpaired_markers"]


def test_an_empty_input_column_adds_nothing(tmp_path: Path) -> None:
    (made,) = read("codealpaca", [{"instruction": "Sort.", "input": "", "output": "ok"}], tmp_path)
    assert made.messages[0].content == "Sort."


def test_every_module_of_schemas_is_imported() -> None:
    folder = ROOT / "eyrie" / "datasets"
    for path in folder.glob("*.py"):
        assert "@schema(" not in path.read_text() or path.stem in vars(importlib.import_module("eyrie.datasets"))
