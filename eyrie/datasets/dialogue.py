"""Chat of many turns."""

from __future__ import annotations

from eyrie.conversation import Reject, listed
from eyrie.datasets.registry import Source
from eyrie.datasets.schema import Row, chat, column, pair, schema


@schema(
    "ultrachat",
    repo="HuggingFaceH4/ultrachat_200k",
    split="train_sft",
    revision="8049631c405ae6576f93f445c6b8166f76f5505a",
    licence="MIT",
    columns={"prompt_id": "name of the row", "messages": "list of {content, role}: user and assistant in turn"},
)
def ultrachat(row: Row, _: Source) -> Row:
    """Multi-turn chat without a system text. Rows of the ``_gen`` splits end with a user turn.

    {"prompt": "Name a fruit.", "prompt_id": "f1",
     "messages": [{"content": "Name a fruit.", "role": "user"}, {"content": "Apple.", "role": "assistant"},
                  {"content": "Another.", "role": "user"}, {"content": "Pear.", "role": "assistant"}]}
    """
    return chat(column(row, "messages"), task_id=row.get("prompt_id"))


@schema(
    "sharegpt",
    repo="Aeala/ShareGPT_Vicuna_unfiltered",
    revision="8b0048ad6ae8c22f46a78c15559dec98feef5539",
    licence="Apache-2.0; the text is scraped from ChatGPT",
    columns={"id": "name, with _N for the N-th part of a long one", "conversations": "list of {from, value}"},
)
def sharegpt(row: Row, _: Source) -> Row:
    """Scraped chats: human, gpt, chatgpt, bing, bard, user and system. Parts of long chats begin with an answer.

    {"id": "QWJhYvA_0", "conversations": [{"from": "gpt", "value": "...and so it ends."},
                                          {"from": "human", "value": "Tell me another."},
                                          {"from": "gpt", "value": "Once there was a hen."}]}
    """
    return chat(column(row, "conversations"), task_id=row.get("id"))


@schema(
    "perfectblend",
    repo="mlabonne/open-perfectblend",
    licence="see its card",
    columns={"conversations": "list of {from, value}", "source": "the set that the row comes from"},
)
@schema(
    "eaglechat",
    repo="zhaode/EagleChat",
    licence="see its card",
    columns={"conversations": "list of {role, content}"},
)
def blend(row: Row, _: Source) -> Row:
    """Mixtures of many sets, with which published drafters were trained. EagleChat holds ShareGPT and UltraChat.

    {"conversations": [{"from": "human", "value": "Name a river."}, {"from": "gpt", "value": "The Rhine."}],
     "source": "ultrachat"}
    """
    return chat(column(row, "conversations"), origin=row.get("source"))


@schema(
    "magpie",
    repo="Magpie-Align/Magpie-Qwen2.5-Pro-1M-v0.1",
    licence="see its card",
    columns={"uuid": "name of the row", "conversations": "list of {from, value}: human, gpt"},
)
def magpie(row: Row, _: Source) -> Row:
    """Questions that a chat model wrote itself.

    {"uuid": "u1", "conversations": [{"from": "human", "value": "What is salt?"}, {"from": "gpt", "value": "NaCl."}]}
    """
    return chat(column(row, "conversations"), task_id=row.get("uuid"))


@schema(
    "infinity",
    repo="nebius/Llama-3.1-8B-Instruct-Infinity-Instruct-0625",
    licence="see its card",
    columns={"conversation": "list of {content, ...}; the first is the user's", "generated_message": "{content, ...}"},
)
def infinity(row: Row, source: Source) -> Row:
    """Infinity-Instruct answered again by Llama 3.1: the first turn and the new answer, in two columns.

    {"conversation": [{"content": "Name a metal.", "role": "user"}],
     "generated_message": {"content": "Iron.", "role": "assistant"}}
    """
    turns, answer = listed(column(row, "conversation")), column(row, "generated_message")
    if not turns or not isinstance(turns[0], dict) or not isinstance(answer, dict):
        raise Reject("malformed", "conversation and generated_message are no messages")
    return pair(source, turns[0].get("content"), answer.get("content"))


@schema(
    "nemotron-chat",
    repo="nvidia/Llama-Nemotron-Post-Training-Dataset",
    subset="SFT",
    split="chat",
    licence="CC-BY-4.0",
    columns={"input": "list of {role, content}", "output": "the answer", "category": "topic"},
)
def nemotron_chat(row: Row, source: Source) -> Row:
    """Chat with the last answer in a column of its own.

    {"input": [{"role": "user", "content": "Name a bird."}], "output": "A crow.", "category": "chat"}
    """
    messages = listed(column(row, "input"))
    if source.kind == "native":
        messages = [*messages, {"role": "assistant", "content": column(row, "output")}]
    return chat(messages, category=row.get("category"))
