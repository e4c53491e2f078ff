"""One HTTP request to one server, with every way in which it can break turned into a :class:`Fault`."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from eyrie.engines.faults import Action, Fault, fault_of

LONGEST_EVENT = 1 << 22  # bytes


@dataclass(frozen=True)
class Line:
    """A session with one server.

    Attributes:
        base: base URL without a slash at its end.
        timeout: seconds from sending to the last byte.
    """

    session: aiohttp.ClientSession
    base: str
    timeout: float

    async def get(self, path: str, *, timeout: float = 30.0) -> Any:
        """The JSON body of a GET. Raises :class:`Fault`."""
        async with self._open("GET", path, None, timeout) as response:
            return await _body(response)

    async def post(self, path: str, payload: dict[str, Any], *, timeout: float | None = None) -> dict[str, Any]:
        """The JSON object that answers a POST. Raises :class:`Fault`, also for an error under status 200."""
        async with self._open("POST", path, payload, timeout or self.timeout) as response:
            body = await _body(response)
        if not isinstance(body, dict):
            raise Fault("empty", Action.RETRY, f"expected a JSON object, got {type(body).__name__}")
        return body

    async def events(self, path: str, payload: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a streamed answer (server-sent events), up to ``[DONE]`` or the end of the stream.

        Raises :class:`Fault` for an error at any place of the stream. A server that does not stream gives one event.
        """
        async with self._open("POST", path, payload, self.timeout) as response:
            if "text/event-stream" not in response.headers.get("Content-Type", ""):
                body = await _body(response)
                if isinstance(body, dict):
                    yield body
                return
            async for event in _events(response):
                fault = fault_of(response.status, event, response.headers)
                if fault is not None:
                    raise fault
                yield event

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, payload: dict[str, Any] | None, timeout: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        data = None if payload is None else json.dumps(payload, ensure_ascii=False, separators=(",", ":")).encode()
        headers = {} if data is None else {"Content-Type": "application/json"}
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 20.0))
        try:
            async with self.session.request(
                method, self.base + path, data=data, headers=headers, timeout=limit, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as error:  # nothing was sent
            raise Fault("unreachable", Action.DOWN, _said(error), cost=0.0) from None
        except aiohttp.ConnectionTimeoutError:
            raise Fault("unreachable", Action.DOWN, "no connection in time", cost=0.0) from None
        except TimeoutError:
            raise Fault("timeout", Action.RETRY, f"no whole answer within {timeout:g} s") from None
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Fault("dropped", Action.RETRY, _said(error)) from None


async def _body(response: aiohttp.ClientResponse) -> Any:
    """The parsed body of an answer that is no error."""
    raw = await response.read()
    body: Any
    try:
        body = json.loads(raw)
    except (json.JSONDecodeError, UnicodeDecodeError):
        body = raw[:300].decode(errors="replace")
    fault = fault_of(response.status, body, response.headers)
    if fault is not None:
        raise fault
    if isinstance(body, str):
        raise Fault("empty", Action.RETRY, f"the body is no JSON: {body[:80]!r}")
    return body


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """JSON of each ``data:`` line; comment lines and other fields are passed over."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_EVENT:
            raise Fault("dropped", Action.RETRY, "an event without an end")
        for line in lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            try:
                event = json.loads(data)
            except (json.JSONDecodeError, UnicodeDecodeError):
                raise Fault("dropped", Action.RETRY, "an event that is no JSON") from None
            if isinstance(event, dict):
                yield event


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def headers_with(key: str | None, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Headers of every request; ``key`` is sent as a bearer token and kept nowhere else."""
    found = {"Accept": "application/json, text/event-stream", **(more or {})}
    return found | ({"Authorization": f"Bearer {key}"} if key else {})
