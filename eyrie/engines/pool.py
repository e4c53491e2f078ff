"""The servers that answer: who gets the next request, who is dead, and how many requests each one bears."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)

CUT, CUT_EVERY = 0.7, 1.0  # a busy server's limit is cut to this share, at most once in so many seconds
DEAD_AFTER = 8  # faults in a row after which a server is looked at before it gets more work


class Server:
    """One base URL.

    Attributes:
        limit: requests it bears at once; falls when it says it is busy, rises again with every answer.
        up: whether it gets work.
        last_ok: when it last gave an answer (monotonic seconds); ``-inf`` before the first.
        version: what it says it is, such as ``sglang 0.5.23``.
        busy_since: when it began to say only that it is busy; None after an answer.
        offers_ids: whether it returns token ids when asked (OpenAI-compatible servers).
    """

    def __init__(self, url: str, limit: int) -> None:
        self.url, self.limit, self.up, self.in_flight = url.rstrip("/"), float(limit), False, 0
        self.last_ok, self.version, self.offers_ids, self.last_fault = float("-inf"), "", False, ""
        self.busy_since: float | None = None
        self._streak, self._cut_at = 0, float("-inf")

    def answered(self, most: int) -> None:
        self._streak, self.busy_since, self.last_ok = 0, None, time.monotonic()
        self.limit = min(float(most), self.limit + 1.0 / self.limit)

    def busy(self) -> None:
        """It said 429, or something like it."""
        now = time.monotonic()
        self.busy_since = self.busy_since or now
        if now - self._cut_at >= CUT_EVERY:
            self.limit, self._cut_at = max(1.0, self.limit * CUT), now

    def faulted(self) -> bool:
        """Count a fault; True when there were so many in a row that the server may be dead."""
        self._streak += 1
        return self._streak >= DEAD_AFTER

    def revived(self) -> None:
        self.up, self._streak, self.busy_since, self.last_ok = True, 0, None, time.monotonic()


class Pool:
    """Servers balanced by load: the least busy one that is up gets the next request.

    Args:
        urls: base URLs.
        concurrency: requests in flight at most, over all servers.
        changed: called whenever there may be more room than before.
    """

    def __init__(self, urls: list[str], concurrency: int, changed: Callable[[], None]) -> None:
        self.servers = [Server(url, concurrency) for url in urls]
        self.concurrency, self._changed = concurrency, changed
        self.closed = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.none_up_since: float | None = time.monotonic()

    @property
    def capacity(self) -> int:
        """Requests that may be in flight now."""
        return min(self.concurrency, sum(int(server.limit) for server in self.servers if server.up))

    def take(self) -> Server | None:
        """A server with room, its place taken; None when there is none now."""
        with_room = [server for server in self.servers if server.up and server.in_flight < int(server.limit)]
        if self.closed or not with_room:
            return None
        chosen = min(with_room, key=lambda server: server.in_flight)
        chosen.in_flight += 1
        return chosen

    @property
    def only_busy_since(self) -> float | None:
        """Since when every server that is up has said nothing but that it is busy."""
        since = [server.busy_since for server in self.servers if server.up]
        known = [moment for moment in since if moment is not None]
        return max(known) if known and len(known) == len(since) else None

    async def place(self) -> Server:
        """Wait for a server with room. Raises :class:`Closed` once the pool is closed."""
        while (server := self.take()) is None:
            if self.closed:
                raise Closed
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return server

    def give_back(self, server: Server) -> None:
        server.in_flight -= 1
        self._wake(2)  # its limit may have risen as well; who finds no room waits on

    def take_out(self, server: Server, why: str) -> None:
        if not server.up:
            return
        server.up, server.last_fault = False, why
        log.warning("%s: taken out of the pool (%s)", server.url, why)
        if not any(other.up for other in self.servers):
            self.none_up_since = time.monotonic()

    def put_back(self, server: Server) -> None:
        log.info("%s: answers (%s)", server.url, server.version or "version unknown")
        server.revived()
        self.none_up_since = None
        self._wake(len(self._waiting))
        self._changed()

    def close(self) -> None:
        """No more places are given; whoever waits for one gets :class:`Closed`."""
        self.closed = True
        self._wake(len(self._waiting))

    def _wake(self, count: int) -> None:
        while count > 0 and self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
                count -= 1


class Closed(Exception):
    """The stage is ending: no further request is sent."""
