"""A server that Eyrie starts itself and shares among the jobs of a run, as an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path

from eyrie.engines.base import Answer, Request
from eyrie.engines.cache_gate import PROMPTS, CacheGate
from eyrie.engines.faults import Action, Fault
from eyrie.engines.http import HttpEngine, Patience
from eyrie.engines.line import Line
from eyrie.engines.pool import Server
from eyrie.engines.sglang import SglangWire
from eyrie.servers.lease import Lease, lease
from eyrie.servers.spec import Spec, State

POLL_S = 0.5
SETTLE_S = 1.0
"""A dying server drops its connections first; by now its supervisor has noticed."""


class ManagedWire(SglangWire):
    """SGLang's ``/generate`` on a leased server, which may die and come back on another port.

    Args:
        stop_ids: token ids that end an answer.
        held: the lease.
    """

    def __init__(self, stop_ids: frozenset[int], held: Lease) -> None:
        super().__init__(stop_ids)
        self.held = held

    async def greet(self, line: Line, server: Server) -> None:
        """Wait for the supervisor's (re)start, take over the server's address, and make sure that it answers.

        Raises:
            EyrieError: its supervisor gave it up.
        """
        while (state := await self._look()) is None:
            await asyncio.sleep(POLL_S)
        server.url = state.url
        await super().greet(replace(line, base=state.url), server)

    async def ask(self, line: Line, server: Server, request: Request) -> Answer:
        """As the plain wire does; a death of the server counts against the server, never against the prompt."""
        before = self.held.files.read_state()
        try:
            return await super().ask(line, server, request)
        except Fault as fault:
            if fault.kind == "dropped" and await self._has_died(before):
                raise Fault("died", Action.DOWN, f"{self.held.log} says why") from None
            raise

    async def _has_died(self, before: State | None) -> bool:
        await asyncio.sleep(SETTLE_S)
        now = await self._look()
        return now is None or before is None or now.life != before.life

    async def _look(self) -> State | None:
        return await asyncio.to_thread(self.held.look)  # it may start a supervisor, which takes a moment


class ManagedEngine:
    """Leases the server for as long as it is asked; equal specs under one root are one server.

    Args:
        spec: the server.
        root: folder for the files of servers.
        stop_ids: token ids that end an answer.
        concurrency: requests in flight at most.
        patience: timeouts, tries and back-off; a restart has the time that the lease gives it on top.
        gate: what the server must pass, on the first requests, before it answers any.
    """

    def __init__(
        self,
        spec: Spec,
        root: Path,
        stop_ids: frozenset[int],
        concurrency: int,
        patience: Patience | None = None,
        gate: CacheGate | None = None,
    ) -> None:
        self.spec, self.root, self.stop_ids, self.gate = spec, root, stop_ids, gate
        self.concurrency, self.patience = concurrency, patience or Patience()

    def answer(self, requests: Iterator[Request | None], finished: Callable[[Request, Answer], None]) -> None:
        """Answer ``requests`` as they come; see :class:`eyrie.engines.base.Engine`.

        Raises:
            EyrieError: the server cannot be had, was given up, or did not pass its gate; every answer that had come was
                handed on.
        """
        if self.gate is not None:
            first = list(islice(iter(lambda: next(requests, None), None), min(PROMPTS, self.concurrency)))
            self.gate.check(first)
            requests = chain(first, requests)
        with lease(self.spec, self.root) as held:
            patience = replace(self.patience, outage=self.patience.outage + held.patience)
            wire, url = ManagedWire(self.stop_ids, held), held.ready().url
            HttpEngine(wire, [url], concurrency=self.concurrency, patience=patience).answer(requests, finished)
