"""The core of every engine that answers over HTTP: concurrency, retries, servers that come and go, money.

One event loop in the caller's thread. A row is a task from the moment it is pulled until it is answered or given up, so
rows in flight never outnumber what the servers bear. What differs by kind of server is a :class:`Wire`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import aiohttp
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential
from tenacity.wait import wait_base

from eyrie.engines.base import Answer, Request
from eyrie.engines.faults import Action, Fault
from eyrie.engines.line import Line, headers_with
from eyrie.engines.money import Purse
from eyrie.engines.pool import Closed, Pool, Server
from eyrie.errors import EyrieError

log = logging.getLogger(__name__)

_END: Any = object()


class Wire(Protocol):
    """What a kind of server is asked, and what its answers mean."""

    name: str

    async def greet(self, line: Line, server: Server) -> None:
        """Make sure that ``server`` really answers; note its version on it. Raises :class:`Fault`, and
        :class:`EyrieError` for what waiting cannot mend."""

    async def ask(self, line: Line, server: Server, request: Request) -> Answer:
        """Answer one request. Raises :class:`Fault`."""

    def worst_case(self, request: Request) -> float:
        """Dollars that the request can cost at most."""


@dataclass(frozen=True)
class Patience:
    """How long to bear what.

    Attributes:
        timeout: seconds for one answer, from sending to its last byte.
        tries: faults of its own after which a row ends as ``refused``.
        outage: seconds without any server that answers, after which the stage stops.
        first_wait, longest_wait: seconds; bounds of the random exponential back-off.
    """

    timeout: float = 900.0
    tries: int = 6
    outage: float = 600.0
    first_wait: float = 0.5
    longest_wait: float = 30.0


@dataclass
class _Row:
    """One request until it is answered."""

    request: Request
    faults: Counter[str] = field(default_factory=Counter)
    tries: int = 0
    first_fault: float = 0.0
    spent: float = 0.0


class _Again(Exception):
    """Try the row again, after ``after`` seconds or the usual back-off."""

    def __init__(self, after: float | None) -> None:
        self.after = after


class _Pause(wait_base):
    """What the server asked for, else a random exponential back-off."""

    def __init__(self, patience: Patience) -> None:
        self._usual = wait_random_exponential(multiplier=patience.first_wait, max=patience.longest_wait)

    def __call__(self, retry_state: RetryCallState) -> float:
        error = retry_state.outcome.exception() if retry_state.outcome else None
        after = error.after if isinstance(error, _Again) else None
        return self._usual(retry_state) if after is None else after


class HttpEngine:
    """Answers prompts by asking servers.

    Args:
        wire: the kind of server.
        urls: base URLs; the least busy one gets the next request.
        concurrency: requests in flight at most, over all servers.
        patience: timeouts, tries and back-off.
        key: bearer token; it is sent to the servers and taken out of everything they say.
        purse: the run's money, for servers that are paid.
    """

    def __init__(
        self,
        wire: Wire,
        urls: list[str],
        *,
        concurrency: int,
        patience: Patience | None = None,
        key: str | None = None,
        purse: Purse | None = None,
    ) -> None:
        self.wire, self.urls, self.concurrency = wire, urls, concurrency
        self.patience, self.purse, self._key = patience or Patience(), purse, key

    def answer(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        """Answer ``requests`` as they come; see :class:`eyrie.engines.base.Engine`.

        Raises:
            EyrieError: no server answers, the key is refused, the money is spent. Every answer that had come was
                handed to ``finished``.
        """
        asyncio.run(_Sitting(self, requests, finished).run())

    def hide_key(self, text: str) -> str:
        return text.replace(self._key, "[key]") if self._key else text

    def session(self) -> aiohttp.ClientSession:
        """A session without cookies, proxies or a limit of its own."""
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers_with(self._key),
        )


class _Sitting:
    """One call of :meth:`HttpEngine.answer`."""

    def __init__(
        self,
        engine: HttpEngine,
        requests: Iterator[Request | None],
        finished: Callable[[Request, Answer], None],
    ) -> None:
        self.engine, self.wire, self.patience, self.purse = engine, engine.wire, engine.patience, engine.purse
        self.requests, self.finished = requests, finished
        self.tasks: set[asyncio.Task[None]] = set()
        self.failure: BaseException | None = None
        self.moved, self.settled = asyncio.Event(), asyncio.Event()
        self.stopping = asyncio.Event()
        self.pool = Pool(engine.urls, engine.concurrency, self.moved.set)
        self.retrying = AsyncRetrying(
            retry=retry_if_exception_type(_Again), wait=_Pause(self.patience), sleep=self._sleep, reraise=True
        )

    async def run(self) -> None:
        async with self.engine.session() as self.session:
            keepers = [asyncio.create_task(self._keep(server)) for server in self.pool.servers]
            keepers.append(asyncio.create_task(self._watch()))
            try:
                await self._drive()
            finally:
                for task in (*keepers, *self.tasks):
                    task.cancel()
                await asyncio.gather(*keepers, *self.tasks, return_exceptions=True)
        if self.failure is not None:
            raise self.failure

    async def _drive(self) -> None:
        """Pull requests while there is room, until they end or the stage must stop."""
        exhausted = False
        while True:
            paused = False
            while not exhausted and self.failure is None and len(self.tasks) < self.pool.capacity:
                try:
                    request = next(self.requests, _END)
                except Exception as error:  # what is on the wire is paid for and waited for
                    self._stop(error)
                    break
                exhausted, paused = request is _END, request is None
                if not isinstance(request, Request):
                    break
                task = asyncio.create_task(self._row(_Row(request)))
                self.tasks.add(task)
                task.add_done_callback(self._done)
            if not self.tasks and (exhausted or paused or self.failure is not None):
                return
            if self.failure is not None and not isinstance(self.failure, Exception):
                return  # an interrupt: nothing is waited for
            await self.moved.wait()
            self.moved.clear()

    async def _row(self, row: _Row) -> None:
        try:
            try:
                answer = await self._try(row)
            except _Again as again:
                await self._sleep(again.after if again.after is not None else self.patience.first_wait)
                answer = await self.retrying(self._try, row)
            if row.faults or self.purse is not None:
                more: dict[str, Any] = {"faults": dict(row.faults)} if row.faults else {}
                if self.purse is not None:
                    more["cost"] = round(row.spent, 9)  # of every try, not of the last one alone
                answer = replace(answer, facts=answer.facts | more)
            self.finished(row.request, answer)
        except Closed:
            pass
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._stop(error)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        self.moved.set()

    def _stop(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self.pool.close()
        self.stopping.set()
        self.settled.set()
        self.moved.set()

    async def _try(self, row: _Row) -> Answer:
        """One attempt. Raises :class:`_Again` when there should be another."""
        server = await self.pool.place()
        try:
            reserved = await self._reserve(row.request)
            cost: float | None = None
            try:
                answer = await self.wire.ask(self._line(server), server, row.request)
                cost = answer.facts.get("cost")
            except Fault as fault:
                cost = fault.cost
                return await self._after(fault, row, server)
            finally:
                if self.purse is not None:
                    self.purse.settle(reserved, cost)
                    row.spent += reserved if cost is None else cost
                    self.settled.set()
        finally:
            self.pool.give_back(server)
        server.answered(self.pool.concurrency)
        return answer

    async def _reserve(self, request: Request) -> float:
        """Set the worst case aside, waiting for what is in flight to settle. The cap ends the stage."""
        if self.purse is None:
            return 0.0
        worst = self.wire.worst_case(request)
        while not self.purse.reserve(worst):
            if self.failure is not None:
                raise Closed
            if self.purse.idle:
                raise EyrieError(
                    f"engine.max_dollars: the next request can cost ${worst:.4f} and would pass the cap of "
                    f"${self.purse.cap:g} (${self.purse.spent_before + self.purse.spent:.4f} are spent); raise it and "
                    "run the same command again; every answer is kept"
                )
            self.settled.clear()
            await self.settled.wait()
        return worst

    async def _after(self, fault: Fault, row: _Row, server: Server) -> Answer:
        """What follows from ``fault``: an answer that says why there is none, another try, or the end of the stage."""
        row.faults[fault.kind] += 1
        text = self.engine.hide_key(fault.text)
        log.debug("%s: %s: %s", server.url, fault.kind, text)
        if fault.action is Action.STOP:
            raise _ended(server, fault.kind, text)
        if fault.action is Action.REFUSE:
            return self._refused(row, f"{fault.kind}: {text}")
        if fault.action is Action.WAIT:
            server.busy()
        elif fault.action is Action.DOWN:
            self.pool.take_out(server, f"{fault.kind}: {text}")
        else:
            row.tries += 1
            row.first_fault = row.first_fault or time.monotonic()
            if server.faulted():
                self.pool.take_out(server, f"{fault.kind}: {text}")
            if row.tries >= self.patience.tries:
                if await self._somebody_answers(row, server):
                    return self._refused(row, f"{row.tries} tries; the last: {fault.kind}: {text}")
                row.tries, row.first_fault = 0, 0.0
        raise _Again(0.0 if fault.action is Action.DOWN else fault.after)

    async def _somebody_answers(self, row: _Row, server: Server) -> bool:
        """Whether it is the prompt and not the servers: one of them has answered since, or does so when asked."""
        if max(other.last_ok for other in self.pool.servers) > row.first_fault:
            return True
        try:
            await self.wire.greet(self._line(server), server)
        except Fault as fault:
            self.pool.take_out(server, fault.kind)
            return False
        server.revived()
        return True

    def _refused(self, row: _Row, why: str) -> Answer:
        log.warning("prompt %d: refused (%s)", row.request.position, why)
        return Answer([], "refused", facts={"why": why})

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or raise :class:`Closed` as soon as the stage ends."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.stopping.wait()
                raise Closed

    async def _keep(self, server: Server) -> None:
        """Greet ``server`` whenever it is not in the pool, again and again, ever more rarely."""
        wait = self.patience.first_wait
        try:
            while True:
                if not server.up:
                    await self._greet(server)
                    wait = self.patience.first_wait if server.up else min(2 * wait, self.patience.longest_wait)
                await asyncio.sleep(min(wait, 1.0) if server.up else wait)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._stop(error)

    async def _watch(self) -> None:
        """End the stage when no server has answered for too long."""
        while True:
            since = self.pool.none_up_since
            if since is not None and time.monotonic() - since > self.patience.outage:
                said = "; ".join(server.last_fault for server in self.pool.servers if server.last_fault)
                text = f"{', '.join(self.engine.urls)}: no server has answered for {self.patience.outage:g} s ({said})"
                mend = "start one, or mend engine.urls, and run the same command again; every answer is kept"
                return self._stop(EyrieError(f"{text}; {mend}"))
            busy = self.pool.only_busy_since
            if busy is not None and time.monotonic() - busy > self.patience.outage + self.patience.timeout:
                text = f"{', '.join(self.engine.urls)}: every answer says that the server is busy, and none came"
                mend = "lower engine.concurrency or come back later, and run the same command again"
                return self._stop(EyrieError(f"{text}; {mend}; every answer is kept"))
            await asyncio.sleep(min(1.0, self.patience.outage / 4))

    async def _greet(self, server: Server) -> None:
        try:
            await self.wire.greet(self._line(server), server)
        except Fault as fault:
            text = self.engine.hide_key(fault.text)
            server.last_fault = f"{fault.kind}: {text}"
            if fault.action in (Action.STOP, Action.REFUSE):
                raise _ended(server, fault.kind, text) from None
            return
        self.pool.put_back(server)

    def _line(self, server: Server) -> Line:
        return Line(self.session, server.url, self.patience.timeout)


def _ended(server: Server, kind: str, text: str) -> EyrieError:
    return EyrieError(f"{server.url}: {kind}: {text}; mend that and run the same command again; every answer is kept")
