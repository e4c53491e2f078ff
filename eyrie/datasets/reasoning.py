"""Reasoning and mathematics: problems with worked answers."""

from __future__ import annotations

from eyrie.conversation import listed
from eyrie.datasets.registry import Source
from eyrie.datasets.schema import Row, chat, column, pair, schema
from eyrie.errors import EyrieError


@schema(
    "mixture-of-thoughts",
    repo="open-r1/Mixture-of-Thoughts",
    subset="all",
    revision="e55fa28006c0d0ec60fb3547520f775dd42d02cd",
    licence="none stated; differs by source",
    columns={"messages": "list of {content, role}: user, assistant", "source": "the set that the row comes from"},
)
def mixture_of_thoughts(row: Row, _: Source) -> Row:
    """Code, mathematics and science with ``<think>`` blocks; ``subset`` is all, code, math or science.

    {"messages": [{"content": "Add 1 and 2.", "role": "user"},
                  {"content": "<think>\\nOne and two.\\n</think>\\n\\nThree.", "role": "assistant"}],
     "num_tokens": 9, "source": "open-r1/codeforces-cots"}
    """
    return chat(column(row, "messages"), origin=row.get("source"))


@schema(
    "openthoughts",
    repo="open-thoughts/OpenThoughts-114k",
    subset="default",
    revision="bd093c3994fd54d2390985b66988ddf282a55eb6",
    licence="Apache-2.0",
    columns={"system": "the system text", "conversations": "list of {from, value}: user, assistant"},
    system="keep",
)
def openthoughts(row: Row, source: Source) -> Row:
    """Reasoning in the markers of OpenThoughts, the system text in a column of its own.

    That system text asks for the markers. With ``system: drop`` the target is asked without it and answers in its own
    manner, which is what a drafter should see.

        {"system": "Answer with a thought and a solution section.",
         "conversations": [{"from": "user", "value": "Add 1 and 2."},
                           {"from": "assistant", "value": "<|begin_of_thought|>\\n\\nOne and two.\\n\\n<|end_of_thought|>\\n\\n<|begin_of_solution|>\\n\\nThree.\\n\\n<|end_of_solution|>"}]}
    """  # noqa: E501
    wanted = source.options["system"]
    if wanted not in {"keep", "drop"}:
        raise EyrieError(f"adapter openthoughts: option 'system' is {wanted!r}; choose keep or drop")
    messages, system = listed(column(row, "conversations")), row.get("system")
    if system and wanted == "keep":
        messages = [{"from": "system", "value": system}, *messages]
    return chat(messages)


@schema(
    "openthoughts3",
    repo="open-thoughts/OpenThoughts3-1.2M",
    licence="Apache-2.0",
    columns={
        "source": "the set that the question comes from",
        "domain": "code, math or science",
        "conversations": "list of {from, value}: human, gpt",
    },
)
def openthoughts3(row: Row, _: Source) -> Row:
    """Sixteen answers a question: an answered dataset keeps the first row of each and counts 15 duplicates.

    {"difficulty": 7, "source": "stackexchange", "domain": "code",
     "conversations": [{"from": "human", "value": "Add 1 and 2."},
                       {"from": "gpt", "value": "<think>One and two.</think>\\n\\nThree."}]}
    """
    return chat(column(row, "conversations"), origin=row.get("source"), category=row.get("domain"))


@schema(
    "gsm8k",
    repo="openai/gsm8k",
    subset="main",
    licence="MIT",
    columns={"question": "the user's text", "answer": "the worked answer"},
)
def gsm8k(row: Row, source: Source) -> Row:
    """Grade-school word problems. A benchmark: its ``test`` split is what drafters are measured on.

    {"question": "Two bags hold 3 apples each. How many apples?", "answer": "2*3 = <<2*3=6>>6\\n#### 6"}
    """
    return pair(source, column(row, "question"), column(row, "answer"))


@schema(
    "hendrycks-math",
    repo="EleutherAI/hendrycks_math",
    subset="algebra",
    licence="MIT",
    columns={"problem": "the user's text", "solution": "the worked answer", "type": "topic"},
)
def hendrycks_math(row: Row, source: Source) -> Row:
    """Competition problems; ``subset`` is the topic.

    {"problem": "Solve $x+1=3$.", "level": "Level 1", "type": "Algebra", "solution": "$x=2$."}
    """
    return pair(source, column(row, "problem"), column(row, "solution"), category=row.get("type"))


@schema(
    "math-qa",
    repo="allenai/math_qa",
    revision="refs/convert/parquet",
    licence="Apache-2.0",
    columns={"Problem": "the question", "options": "the choices, as one text", "Rationale": "the worked answer"},
)
def math_qa(row: Row, source: Source) -> Row:
    """Word problems with choices; column names begin with capitals. Read from the hub's own conversion to Parquet.

    {"Problem": "What is 2 + 2?", "Rationale": "2 + 2 = 4, answer b.", "options": "a ) 3 , b ) 4", "correct": "b"}
    """
    return pair(source, f"{column(row, 'Problem')}\n{column(row, 'options')}", column(row, "Rationale"))


@schema(
    "sciq",
    repo="allenai/sciq",
    licence="CC-BY-NC-3.0",
    columns={"question": "the user's text", "correct_answer": "the answer, a few words"},
)
def sciq(row: Row, source: Source) -> Row:
    """Science questions, asked without their choices, so that no shuffle is needed.

    {"question": "What gas do plants take in?", "distractor1": "oxygen", "distractor2": "helium",
     "distractor3": "argon", "correct_answer": "carbon dioxide", "support": "Plants take in carbon dioxide."}
    """
    return pair(source, column(row, "question"), column(row, "correct_answer"))


@schema(
    "camel",
    repo="camel-ai/physics",
    licence="CC-BY-NC-4.0",
    columns={"message_1": "the user's text", "message_2": "the answer", "topic;": "topic"},
)
def camel(row: Row, source: Source) -> Row:
    """Problems and solutions that two models gave each other; ``repo`` chooses the subject.

    {"role_1": "Physicist", "topic;": "Optics", "sub_topic": "Lenses", "message_1": "What is a lens?",
     "message_2": "A piece of glass that bends light."}
    """
    return pair(source, column(row, "message_1"), column(row, "message_2"))
