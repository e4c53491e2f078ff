"""Trajectories of software-engineering agents."""

from __future__ import annotations

from eyrie.conversation import listed
from eyrie.datasets.registry import Source
from eyrie.datasets.schema import Row, chat, column, schema


@schema(
    "swe-agent",
    repo="nebius/SWE-agent-trajectories",
    revision="68195a1450865274106246d0d0296a1d6807b88e",
    licence="CC-BY-4.0; each repository's own; Llama 3.1's for its answers",
    columns={
        "instance_id": "the task",
        "model_name": "who answered",
        "trajectory": "list, or JSON string of one, of {role, text, system_prompt, ...}: system, user, ai",
    },
)
def swe_agent(row: Row, _: Source) -> Row:
    """SWE-agent runs. Text stands in ``text``, a system message's in ``system_prompt``.

    {"instance_id": "a__b-1", "model_name": "swe-agent-llama-70b", "target": true, "exit_status": "submitted",
     "trajectory": [{"role": "system", "system_prompt": "SETTING: a shell.", "text": null, "mask": false},
                    {"role": "user", "text": "Fix issue 1.", "mask": false},
                    {"role": "ai", "text": "I open the file.\\n```\\nopen a.py\\n```", "mask": false},
                    {"role": "user", "text": "[File: a.py]", "mask": false}],
     "generated_patch": "diff", "eval_logs": "ok"}
    """
    turns = [
        {**turn, "text": turn["system_prompt"]}
        if isinstance(turn, dict) and turn.get("text") is None and turn.get("system_prompt")
        else turn
        for turn in listed(column(row, "trajectory"))
    ]
    return chat(turns, task_id=row.get("instance_id"), generator=row.get("model_name"))


@schema(
    "swe-smith",
    repo="SWE-bench/SWE-smith-trajectories",
    split="tool",
    licence="MIT",
    columns={
        "messages": "list, or JSON string of one, of {role, content, tool_calls}; content may be a list of parts",
        "instance_id": "the task",
        "model": "who answered",
        "traj_id": "the run",
    },
)
def swe_smith(row: Row, _: Source) -> Row:
    """The same runs in three call formats: choose one ``split`` of tool, xml and ticks. A run counts once.

    {"messages": "[{\\"role\\": \\"user\\", \\"content\\": [{\\"type\\": \\"text\\", \\"text\\": \\"Fix it.\\"}]}, {\\"role\\": \\"assistant\\", \\"content\\": \\"I look.\\", \\"tool_calls\\": [{\\"id\\": \\"c1\\", \\"type\\": \\"function\\", \\"function\\": {\\"name\\": \\"bash\\", \\"arguments\\": \\"{\\\\\\"cmd\\\\\\": \\\\\\"ls\\\\\\"}\\"}}]}, {\\"role\\": \\"tool\\", \\"content\\": \\"a.py\\", \\"tool_call_id\\": \\"c1\\"}, {\\"role\\": \\"user\\", \\"content\\": \\"Go on.\\"}]",
     "instance_id": "a__b.1", "resolved": true, "model": "m", "traj_id": "a__b.1.x", "patch": "diff"}
    """  # noqa: E501
    made = chat(column(row, "messages"), task_id=row.get("instance_id"), generator=row.get("model"))
    return {**made, "key": f"{column(row, 'instance_id')} {column(row, 'traj_id')}"}


@schema(
    "coderforge",
    repo="togethercomputer/CoderForge-Preview",
    subset="trajectories",
    split="SWE_Rebench",
    licence="by row, column license",
    columns={
        "trajectory_id": "the run",
        "messages": "JSON string: list of {role, content, tool_calls}",
        "tools": "JSON string: the declared tools",
        "license": "of the row",
    },
)
def coderforge(row: Row, _: Source) -> Row:
    """Runs with messages and tools as JSON strings; ``split`` is the source or ``filtered_reward1``.

    {"trajectory_id": "t1", "finish_reason": "stop", "image": "docker/a:1", "reward": 1.0, "license": "MIT",
     "messages": "[{\\"role\\": \\"user\\", \\"content\\": \\"Fix it.\\"}, {\\"role\\": \\"assistant\\", \\"content\\": \\"Done.\\"}]",
     "tools": "[{\\"type\\": \\"function\\", \\"function\\": {\\"name\\": \\"bash\\", \\"parameters\\": {\\"type\\": \\"object\\"}}}]"}
    """  # noqa: E501
    made = chat(
        column(row, "messages"), column(row, "tools"), task_id=row.get("trajectory_id"), licence=row.get("license")
    )
    return {**made, "key": row.get("trajectory_id")}


MESSAGES = {"messages": "list of {role, content}", "instance_id": "the task, where there is one"}


@schema(
    "swe-smith-mini",
    repo="Kwai-Klear/SWE-smith-mini_swe_agent_plus-trajectories-66k",
    licence="MIT",
    columns=MESSAGES,
)
@schema(
    "openhands-sft",
    repo="SWE-Gym/OpenHands-SFT-Trajectories",
    split="train.success.oss",
    licence="MIT",
    columns=MESSAGES,
)
def agent_messages(row: Row, _: Source) -> Row:
    """Runs as plain messages: what a command printed is a user turn, the system text only sets the format.

    {"instance_id": "a__b.1", "messages": [{"role": "system", "content": "Answer with one command."},
                                           {"role": "user", "content": "Fix it."},
                                           {"role": "assistant", "content": "ls"},
                                           {"role": "user", "content": "a.py"}]}
    """
    return chat(column(row, "messages"), task_id=row.get("instance_id"))
