"""A server of ours: SGLang's ``/generate``, chat completions and OpenRouter's routes, with every documented fault.

What it answers is a function of the prompt alone (:meth:`tests.generate_desk.FakeEngine.of`), so a shard made
through any weather can be held against an undisturbed one. Faults are drawn by prompt and attempt, not by time.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from aiohttp import web

from eyrie.config import Sampling
from eyrie.engines.base import Answer, Request
from tests.generate_desk import STOP, FakeEngine

FAST = {"timeout": 5.0, "outage": 5.0, "concurrency": 16}  # options of an engine that asks it
PRICE = {"prompt": 1e-6, "completion": 5e-6}
ENDPOINT = {
    "provider_name": "Alpha", "tag": "alpha/int4", "quantization": "int4", "context_length": 4096,
    "max_completion_tokens": 2048, "status": 0, "pricing": {name: str(price) for name, price in PRICE.items()},
    "supported_parameters": ["max_tokens", "temperature", "top_p", "reasoning", "seed", "tools"],
}  # fmt: skip

# Faults after which the same request is answered when it comes again.
PASSING = (
    "429", "429-in-200", "408", "500", "502", "502-in-200", "503", "504", "524", "529", "choices-null", "choices-empty",
    "empty-text", "error-finish", "mid-stream", "drop", "cut", "garbage", "not-retry-after",
)  # fmt: skip


class FakeServer:
    """Runs in a thread of its own between ``with`` and its end.

    Args:
        share: how many attempts fail, 0 to 1.
        faults: names out of :data:`PASSING`, ``loris``, or HTTP codes.
        most: faults that one prompt meets at most, so that none is refused by chance.
        poison: prompts whose last message holds this text fail for ever, with ``poison_fault``.
        delay: seconds per answer, by prompt ids.
        ids: return token ids in chat when asked.
        route: changes a chat body before it is sent (parser faults, refusals), given the body that asked for it.
    """

    def __init__(
        self,
        *,
        share: float = 0.0,
        faults: tuple[str, ...] = PASSING,
        most: int = 4,
        poison: str = "\0",
        poison_fault: str = "500",
        delay: Callable[[list[int]], float] = lambda ids: 0.0,
        ids: bool = False,
        route: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]] = lambda made, body: made,
        key: str | None = None,
        limit_remaining: float | None = 100.0,
        port: int = 0,
    ) -> None:
        self.share, self.faults, self.most = share, faults, most
        self.poison, self.poison_fault, self.delay = poison, poison_fault, delay
        self.ids, self.route, self.key, self.limit_remaining, self.port = ids, route, key, limit_remaining, port
        self.endpoints: list[dict[str, Any]] = [dict(ENDPOINT)]
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.answered: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.dollars, self.in_flight, self.most_in_flight = 0.0, 0, 0
        self.attempts: Counter[str] = Counter()
        self.hit: Counter[str] = Counter()
        self.url = ""

    def __enter__(self) -> FakeServer:
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        async def end() -> None:
            await self._runner.cleanup()
            self.loop.stop()

        asyncio.run_coroutine_threadsafe(end(), self.loop)
        self._thread.join(10)
        self.loop.close()

    def _run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._start())
        started.set()
        self.loop.run_forever()

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._door])
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/key", self._get_key)
        app.router.add_get("/v1/credits", self._credits)
        app.router.add_get("/v1/models/{author}/{slug}/endpoints", self._list_endpoints)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    @web.middleware
    async def _door(self, request: web.Request, handler: Any) -> Any:
        given = request.headers.get("Authorization", "")
        if self.key and given != f"Bearer {self.key}":
            return error(401, f"no such key: {given}")
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            return await handler(request)
        finally:
            self.in_flight -= 1

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.23"})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "the-target"}]})

    async def _get_key(self, _: web.Request) -> web.Response:
        return web.json_response({"data": {"limit": 100, "limit_remaining": self.limit_remaining, "usage": 1}})

    async def _credits(self, _: web.Request) -> web.Response:
        return error(403, "only provisioning keys may look")

    async def _list_endpoints(self, _: web.Request) -> web.Response:
        return web.json_response({"data": {"endpoints": self.endpoints}})

    # ---- answers ----
    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids, params = body["input_ids"], body["sampling_params"]
        if params["max_new_tokens"] == 1:
            return web.json_response({"output_ids": [5], "meta_info": {"finish_reason": {"type": "length"}}})
        assert params["stop_token_ids"] == [STOP]
        answer = answer_to(ids, params["max_new_tokens"])
        name = bytes(ids).decode()
        trouble = await self._trouble(name, request, ids)
        if trouble is not None:
            return trouble
        reason = {"type": answer.finish_reason}
        if answer.finish_reason == "stop":
            reason["matched"] = STOP
        self.answered[name] += 1
        meta = {"finish_reason": reason, "cached_tokens": 3, "prompt_tokens": len(ids), "id": "x"}
        return web.json_response({"text": "", "output_ids": answer.output_ids, "meta_info": meta})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        name = body["messages"][-1]["content"]
        if body["max_tokens"] == 1:
            choice: dict[str, Any] = {"message": {"content": "a"}, "finish_reason": "length"}
            if self.ids and body.get("return_token_ids"):
                choice["token_ids"] = [5]
            return web.json_response({"choices": [choice], "system_fingerprint": "fake"})
        self.bodies.append(body)
        ids = list(name.encode())
        answer = answer_to(ids, body["max_tokens"])
        trouble = await self._trouble(name, request, ids, body)
        if trouble is not None:
            return trouble
        made = self.route(self._completion(body, ids, answer), body)
        self.answered[name] += 1
        self.dollars += made["usage"].get("cost", 0.0)
        return await self._streamed(request, made) if body.get("stream") else web.json_response(made)

    def _completion(self, body: dict[str, Any], ids: list[int], answer: Answer) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "message": {"role": "assistant", "content": spoken(answer)}, "finish_reason": answer.finish_reason,
        }  # fmt: skip
        if self.ids and body.get("return_token_ids"):
            choice |= {"token_ids": answer.output_ids, "stop_reason": None}
        count = len(answer.output_ids)
        cost = PRICE["prompt"] * len(ids) + PRICE["completion"] * count
        usage = {"prompt_tokens": len(ids), "completion_tokens": count, "cost": cost}
        made = {"id": "gen-1", "model": body["model"], "provider": "Alpha", "choices": [choice], "usage": usage}
        return made | ({"prompt_token_ids": ids} if "token_ids" in choice else {})

    async def _streamed(self, request: web.Request, made: dict[str, Any]) -> web.StreamResponse:
        response = await opened(request)
        choice = made["choices"][0]
        message, rest = choice["message"], {name: made[name] for name in ("id", "model", "provider")}
        await response.write(b": OPENROUTER PROCESSING\n\n")
        for delta in in_pieces(message):
            await send(response, {**rest, "choices": [{"delta": delta, "finish_reason": None}]})
        await send(response, {**rest, "choices": [{"delta": {}, "finish_reason": choice["finish_reason"]}]})
        await send(response, {**rest, "choices": [], "usage": made["usage"]})
        await response.write(b"data: [DONE]\n\n")
        return response

    # ---- faults ----
    async def _trouble(
        self, name: str, request: web.Request, ids: list[int], body: dict[str, Any] | None = None
    ) -> web.StreamResponse | None:
        """Wait as long as the answer takes; a fault in place of it, or None."""
        self.asked.append(name)
        self.attempts[name] += 1
        draw = random.Random(f"{name} {self.attempts[name]}")
        fault = ""
        if self.poison in name:
            fault = self.poison_fault
        elif self.hit[name] < self.most and draw.random() < self.share:
            fault = draw.choice(self.faults)
            self.hit[name] += 1
        if fault:
            self.injected[fault] += 1
            return await FAULTS.get(fault, by_code)(fault, request, body)
        await asyncio.sleep(self.delay(ids))
        return None


def answer_to(ids: list[int], max_tokens: int) -> Answer:
    return FakeEngine.of(Request(0, ids, Sampling(max_tokens=max_tokens), 0))


def spoken(answer: Answer) -> str:
    """The answer as text: a letter per token, the stop token left out."""
    ids = answer.output_ids[:-1] if answer.finish_reason == "stop" else answer.output_ids
    return "".join(chr(97 + token % 26) for token in ids) or "x" * bool(answer.output_ids)


def in_pieces(message: dict[str, Any]) -> list[dict[str, Any]]:
    """A message as the deltas of a stream: text in halves, each tool call as its name and then its arguments."""
    calls, content = message.get("tool_calls") or [], message["content"] or ""
    first = {name: value for name, value in message.items() if name != "tool_calls"} | {
        "content": content[: len(content) // 2]
    }
    pieces = [first, {"content": content[len(content) // 2 :]}]
    for index, call in enumerate(calls):
        text = call["function"]["arguments"]
        head = {**call, "index": index, "function": {**call["function"], "arguments": ""}}
        parts = (
            {"index": index, "function": {"arguments": part}}
            for part in (text[: len(text) // 2], text[len(text) // 2 :])
        )
        pieces += [{"tool_calls": [part]} for part in (head, *parts)]
    return pieces


def error(code: int, message: str, *, status: int | None = None, **more: Any) -> web.Response:
    headers = {"Retry-After": "0"} if code in (429, 503) else {}
    body = {"error": {"code": code, "message": message, **more}}
    return web.json_response(body, status=status or code, headers=headers)


async def by_code(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    """``502``: that HTTP status; ``502-in-200``: the same inside a 200; ``code:type``: with an error_type."""
    code, _, kind = fault.removesuffix("-in-200").partition(":")
    more = {"metadata": {"error_type": kind}} if kind else {}
    return error(int(code), f"fault {fault}", status=200 if fault.endswith("-in-200") else None, **more)


async def shape(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    """Bodies that are no answer, all under status 200."""
    partial = {"message": {"content": "half an ans"}, "finish_reason": "error"}
    empty = {"message": {"content": ""}, "finish_reason": None}
    choices = {"choices-null": None, "choices-empty": [], "error-finish": [partial], "empty-text": [empty]}[fault]
    return web.json_response({"id": "gen-2", "choices": choices})


async def garbage(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    return web.Response(text="<html>bad gateway</html>", content_type="text/html")


async def not_retry_after(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    return web.json_response({"error": "slow down"}, status=429, headers={"Retry-After": "soon"})


async def mid_stream(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    """An error after half of the text: under the same 200, as a provider that dies gives it."""
    response = await opened(request)
    await send(response, {"id": "gen-3", "choices": [{"delta": {"content": "half an ans"}, "finish_reason": None}]})
    choice = {"delta": {"content": ""}, "finish_reason": "error"}
    await send(response, {"id": "gen-3", "error": {"code": "server_error", "message": "gone"}, "choices": [choice]})
    return response


async def cut(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    """A stream that ends without an end."""
    response = await opened(request)
    await send(response, {"id": "gen-4", "choices": [{"delta": {"content": "half an ans"}, "finish_reason": None}]})
    return response


async def drop(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    """Half a body, then the connection is gone."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"output_ids": [1, 2,')
    assert request.transport is not None
    request.transport.abort()
    return response


async def loris(fault: str, request: web.Request, body: Any) -> web.StreamResponse:
    """A byte now and then, for ever."""
    response = await opened(request)
    while True:
        await response.write(b":")
        await asyncio.sleep(0.05)


async def opened(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


async def send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


FAULTS = {
    "choices-null": shape, "choices-empty": shape, "error-finish": shape, "empty-text": shape, "garbage": garbage,
    "mid-stream": mid_stream, "cut": cut, "drop": drop, "loris": loris, "not-retry-after": not_retry_after,
}  # fmt: skip
