"""Conversations whose answers come from a Kimi model: the native sources for a Kimi target."""

from __future__ import annotations

import json
import re
from typing import Any

from eyrie.conversation import Reject, listed, parsed
from eyrie.datasets.registry import Source
from eyrie.datasets.schema import Row, chat, column, pair, recognised, schema
from eyrie.markers import Unpaired, split_reasoning

CALL, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE = re.compile(r"\s*<tool_response>(.*?)</tool_response>", re.DOTALL)

DEEPSWE = {"messages": "list of {role, content}: system, then user and assistant in turn"}


@schema(
    "deepswe-kimi-k2",
    repo="SWE-Factory/DeepSWE-Agent-Kimi-K2-Trajectories-2.8K",
    revision="2a2175e291a0606376592af08b64c25afabe72a9",
    licence="MIT",
    columns=DEEPSWE,
)
@schema(
    "deepswe-kimi-k2-sampled",
    repo="SWE-Factory/DeepSWE-Agent-Kimi-K2-Trajectories-Rejection-Sampling",
    licence="see its card",
    columns=DEEPSWE,
)
def deepswe(row: Row, _: Source) -> Row:
    """Software-engineering trajectories. Calls and edits are plain text; what the tools say comes back as a user turn.

    The answers are Kimi-K2's, which does not think before it answers: give the dataset a low ``weight`` where the
    target is a later Kimi. The second name is the sibling that was chosen by rejection sampling.

        {"messages": [{"role": "system", "content": "You are a programming agent."},
                      {"role": "user", "content": "Fix the failing test in utils.py."},
                      {"role": "assistant", "content": "I look first.\\n<function=view>utils.py</function>"},
                      {"role": "user", "content": "1: def half(x): return x / 3"},
                      {"role": "assistant", "content": "<function=edit>return x / 2</function>"}]}
    """
    return chat(column(row, "messages"), generator="kimi-k2")


@schema(
    "hermes-kimi",
    repo="lambda/hermes-agent-reasoning-traces",
    subset="kimi",
    revision="b92885e4f0161d4b2536512710e004d4892cac6e",
    licence="Apache-2.0",
    columns={
        "id": "name of the row",
        "conversations": "list of {from, value}: system, human, gpt, tool",
        "tools": "JSON string: the declared tools",
        "category": "topic",
    },
)
def hermes_kimi(row: Row, _: Source) -> Row:
    """Agent traces of Kimi-K2.5, with ``<think>`` blocks and tool calls as text in the manner of Hermes.

    Calls and results become tool calls with ids of the target's own form and results that name them. Reasoning is
    split as where a server had no parser: the opening tag may be missing, and a call ends it.

        {"id": "a1", "category": "files", "subcategory": "search", "task": "count",
         "conversations": [{"from": "system", "value": "You may call functions."},
                           {"from": "human", "value": "How many notes are there?"},
                           {"from": "gpt", "value": "<think>\\nI list them.\\n</think>\\n<tool_call>\\n{\\"name\\": \\"ls\\", \\"arguments\\": {\\"path\\": \\"notes\\"}}\\n</tool_call>"},
                           {"from": "tool", "value": "<tool_response>\\n[\\"a.md\\", \\"b.md\\"]\\n</tool_response>"},
                           {"from": "gpt", "value": "<think>\\nTwo.\\n</think>\\nThere are two notes."}],
         "tools": "[{\\"type\\": \\"function\\", \\"function\\": {\\"name\\": \\"ls\\", \\"parameters\\": {\\"type\\": \\"object\\"}}}]"}
    """  # noqa: E501
    messages: list[Row] = []
    waiting: list[Row] = []
    count = 0
    for turn in listed(column(row, "conversations")):
        value = turn.get("value") if isinstance(turn, dict) else None
        role = str(turn.get("from")).lower() if isinstance(turn, dict) else None
        if role == "gpt" and isinstance(value, str):
            content, reasoning, calls = _hermes_answer(value)
            waiting = []
            for function in calls:
                name = f"functions.{function['name']}:{count}"
                waiting.append({"id": name, "type": "function", "function": function})
                count += 1
            messages.append(
                {"role": role, "content": content, "reasoning": reasoning, "tool_calls": list(waiting) or None}
            )
        elif role == "tool" and isinstance(value, str):
            for said in _hermes_results(value):
                message = {"role": role, "content": said}
                if waiting:  # results come in the order of their calls
                    call = waiting.pop(0)
                    message.update(tool_call_id=call["id"], name=call["function"]["name"])
                messages.append(message)
        else:
            messages.append(turn)
    return chat(
        messages, column(row, "tools"), generator="kimi-k2.5", task_id=row.get("id"), category=row.get("category")
    )


def _hermes_answer(text: str) -> tuple[str, str | None, list[Row]]:
    """Content, reasoning and calls of an answer; whatever follows the first call must be a call."""
    try:
        reasoning, content = split_reasoning(text, parserless=[CALL])
    except Unpaired as error:
        raise Reject("unpaired_markers", str(error)) from None
    content, opened, rest = content.partition(CALL)
    calls = []
    while opened:
        inside, closed, rest = rest.partition(CALL_END)
        if not closed or CALL in inside:
            raise Reject("unpaired_markers", f"no {CALL_END}")
        call = parsed(inside)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Reject("malformed", f"tool call {inside.strip()[:60]}")
        calls.append({"name": call["name"], "arguments": call.get("arguments")})
        between, opened, rest = rest.partition(CALL)
        if between.strip():
            raise Reject("malformed", "text behind a tool call")
    if CALL_END in content:
        raise Reject("unpaired_markers", f"no {CALL}")
    return content.strip("\n") if calls else content, reasoning, calls


def _hermes_results(text: str) -> list[str]:
    """What the tools said, one text a result."""
    results, at = [], 0
    while found := RESPONSE.match(text, at):
        results.append(found[1].strip("\n"))
        at = found.end()
    if results and text[at:].strip():
        raise Reject("unpaired_markers", "text outside <tool_response>")
    return results or [text]


@schema(
    "kimi-k2.5-million",
    repo="ianncity/KIMI-K2.5-1000000x",
    licence="Apache-2.0",
    columns={},
)
@schema(
    "octomed-kimi",
    repo="OctoMed/KIMI-K2.5-Reasoning",
    licence="Apache-2.0",
    columns={},
)
def kimi_mixed(row: Row, source: Source) -> Row:
    """Distillations of Kimi-K2.5 whose files do not share one schema: each row is read by the columns that it has.

    A list of messages in one of the usual columns, or a question with its answer; a row with neither is rejected. Name
    single files of the repository with ``files``.

        {"messages": [{"role": "user", "content": "Why is the sky blue?"},
                      {"role": "assistant", "content": "<think>Scattering.</think>Short waves scatter more."}]}
    """
    made = recognised(row, source)
    return {**made, "meta": {"generator": "kimi-k2.5"}}


@schema(
    "kimi-reasoning-traces",
    repo="bmeyer2025/kimi-reasoning-traces",
    licence="none stated",
    columns={
        "id": "name of the row",
        "source": "where the problem comes from",
        "problem": "the user's text",
        "thinking": "reasoning, in a column of its own",
        "response": "the answer",
    },
)
def kimi_reasoning_traces(row: Row, source: Source) -> Row:
    """Single questions with reasoning and answer in columns of their own.

    {"id": "7", "source": "gsm8k", "problem": "What is 6 times 7?", "expected_answer": "42",
     "thinking": "Six sevens.", "response": "42", "teacher": "kimi-k2.5", "thinking_tokens": 3}
    """
    return pair(
        source,
        column(row, "problem"),
        column(row, "response"),
        reasoning=row.get("thinking"),
        task_id=_text(row.get("id")),
        origin=row.get("source"),
    )


def _text(value: Any) -> str | None:
    return None if value is None else value if isinstance(value, str) else json.dumps(value)
