"""The engine that a recipe asks for, made only when there is something to answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyrie.config import Engine as Options
from eyrie.config import Sampling, Server
from eyrie.conversation import Reject
from eyrie.engines.base import Engine, Request
from eyrie.engines.money import Outlook
from eyrie.errors import EyrieError
from eyrie.targets.card import TargetCard, resolve

if TYPE_CHECKING:
    from eyrie.engines.chat import Encode
    from eyrie.engines.http import HttpEngine
    from eyrie.render.renderer import TurnRow
    from eyrie.servers.spec import Spec

# Environment variables that hold a key; it is read from there and written nowhere.
KEYS = {"sglang": "SGLANG_API_KEY", "openai": "OPENAI_API_KEY", "openrouter": "OPENROUTER_API_KEY"}
LastTurn = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], "TurnRow | Reject"]


def hire(
    recipe: dict[str, Any],
    options: Options,
    card: TargetCard,
    model: str,
    *,
    threads: int,
    last_turn: LastTurn,
    outlook: Callable[[], Outlook],
    ledger: Path,
    owner: str,
    server: Server,
    servers: Path,
) -> Callable[[], Engine]:
    """How to make the engine; nothing heavy is imported and no server is asked before it is called.

    Args:
        recipe: of the generate stage.
        options: the ``engine`` section.
        model: local Hugging Face folder or hub id of the target.
        threads: CPU threads of an engine in this process.
        last_turn: renders a finished conversation (:meth:`eyrie.render.renderer.Renderer.last_turn`).
        outlook: what is left to buy.
        ledger, owner: see :class:`eyrie.engines.money.Purse`.
        server: the ``server`` section; what of it changes an answer is taken from the recipe instead.
        servers: folder for the files of servers that Eyrie starts.
    """
    if options.managed:
        return lambda: _managed(recipe, options, card, model, threads, server, servers)
    if options.kind == "transformers":
        return lambda: _in_process(recipe, options, card, model, threads)
    return lambda: _served(recipe, options, card, encoder(last_turn), outlook, ledger, owner)


def _in_process(recipe: dict[str, Any], options: Options, card: TargetCard, model: str, threads: int) -> Engine:
    from eyrie.engines.transformers import TransformersEngine
    from eyrie.machine import choose_device, choose_dtype, use_threads

    use_threads(threads)
    device = choose_device(options.device)
    dtype = choose_dtype(recipe.get("target", {}).get("dtype", "auto"), device)
    folder = resolve(model, recipe.get("target", {}).get("revision"))
    return TransformersEngine(folder, frozenset(card.stop_ids), dtype, options.batch_size, device)


def _managed(
    recipe: dict[str, Any], options: Options, card: TargetCard, model: str, threads: int, server: Server, servers: Path
) -> Engine:
    from eyrie.engines.cache_gate import CacheGate
    from eyrie.engines.http import Patience
    from eyrie.engines.managed import ManagedEngine
    from eyrie.machine import choose_dtype, name_of
    from eyrie.servers.flags import sglang_version
    from eyrie.servers.sglang import choose_server_device, server_python, sglang_spec

    target, server = recipe.get("target", {}), server.with_recipe(recipe.get("server", {}))
    dtype = choose_dtype(target.get("dtype", "auto"), choose_server_device(server))
    stop_ids, folder = frozenset(card.stop_ids), resolve(model, target.get("revision"))

    def spec_of(server: Server) -> Spec:
        return sglang_spec(
            server,
            model=folder,
            dtype=name_of(dtype),
            threads=threads,
            trust_remote_code=target.get("trust_remote_code", False),
            probe_ids=tuple(card.stop_ids[:1]),
        )

    spec, gate = spec_of(server), None
    if server.kv_cache != "auto" and server.kv_cache_gate > 0:
        plain = spec_of(server.model_copy(update={"kv_cache": "auto"}))
        plain = plain.model_copy(update={"planned_pool_tokens": None})  # its pool is half as large, and large enough
        made_of = {"sglang": sglang_version(server_python(server)), "target": card.target}
        gate = CacheGate(plain, spec, servers, server.kv_cache_gate, stop_ids, made_of)
    # what is more than the server decodes at once would only wait there, and overshoot the budget
    concurrency = min(options.concurrency, server.max_running_requests)
    patience = Patience(options.timeout, options.tries, options.outage)
    return ManagedEngine(spec, servers, stop_ids, concurrency, patience, gate)


def _served(
    recipe: dict[str, Any],
    options: Options,
    card: TargetCard,
    encode: Encode,
    outlook: Callable[[], Outlook],
    ledger: Path,
    owner: str,
) -> HttpEngine:
    from eyrie.engines.http import HttpEngine, Patience, Wire
    from eyrie.engines.money import Purse
    from eyrie.engines.openai import OpenAiWire
    from eyrie.engines.openrouter import URL, OpenRouterWire
    from eyrie.engines.sglang import SglangWire

    key = os.environ.get(KEYS[options.kind]) or None
    urls, purse = list(options.urls), None
    wire: Wire
    if options.kind == "sglang":
        wire = SglangWire(frozenset(card.stop_ids))
    elif options.kind == "openai":
        wire = OpenAiWire(str(options.model), encode, options.reasoning)
    else:
        if key is None:
            raise EyrieError(f"the environment has no {KEYS['openrouter']}; export the key there, never in the config")
        urls, cap = [os.environ.get("OPENROUTER_BASE_URL", URL)], float(options.max_dollars or 0.0)
        purse = Purse(ledger, owner, cap)
        wire = OpenRouterWire(
            str(options.model), options.openrouter, encode, reasoning=options.reasoning, outlook=outlook, cap=cap,
            max_tokens=Sampling.model_validate(recipe.get("sampling", {})).max_tokens,
        )  # fmt: skip
    patience = Patience(options.timeout, options.tries, options.outage)
    return HttpEngine(wire, urls, concurrency=options.concurrency, patience=patience, key=key, purse=purse)


def encoder(last_turn: LastTurn) -> Encode:
    """Text to ids: the conversation is rendered with the answer as its last turn, as it would be at serving time."""

    def encode(request: Request, message: dict[str, Any]) -> tuple[list[int], list[int]]:
        row = last_turn([*request.messages, message], request.tools)
        if isinstance(row, Reject):
            raise row
        return row.input_ids[: row.start], row.input_ids[row.start :]

    return encode
