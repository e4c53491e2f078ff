"""SGLang's native ``/generate``: ids in, ids out, so rows hold exactly what was served."""

from __future__ import annotations

from typing import Any

from eyrie.engines.base import Answer, Request, answer_seed, with_stop
from eyrie.engines.faults import Action, Fault
from eyrie.engines.line import Line
from eyrie.engines.pool import Server


class SglangWire:
    """Speaks ``/generate`` (SGLang 0.5).

    Args:
        stop_ids: token ids that end an answer; sent with every request, whatever the server's own defaults are.
    """

    name = "sglang"

    def __init__(self, stop_ids: frozenset[int]) -> None:
        self.stop_ids = sorted(stop_ids)

    async def greet(self, line: Line, server: Server) -> None:
        """Read the version, then generate a token: a server can be healthy by its own word and answer nothing."""
        info = await line.get("/server_info")
        server.version = f"sglang {info.get('version', 'of unknown version')}" if isinstance(info, dict) else "sglang"
        probe = {"input_ids": self.stop_ids[:1], "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
        body = await line.post("/generate", probe, timeout=min(line.timeout, 120.0))
        if not body.get("output_ids"):
            raise Fault("empty", Action.RETRY, "a probe brought no token")

    async def ask(self, line: Line, server: Server, request: Request) -> Answer:
        body = await line.post("/generate", self.payload(request))
        meta = body.get("meta_info")
        ids = body.get("output_ids")
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if not isinstance(ids, list) or not isinstance(meta, dict) or not isinstance(reason, dict):
            raise Fault("empty", Action.RETRY, "the answer has no output_ids or no finish_reason")
        kind = reason.get("type")
        if kind == "abort":
            bad = reason.get("status_code") in (400, 413, 422)
            raise Fault("abort", Action.REFUSE if bad else Action.RETRY, str(reason.get("message") or ""))
        if kind not in ("stop", "length"):
            raise Fault("empty", Action.RETRY, f"finish_reason {kind!r}")
        ids = with_stop(ids, kind, reason.get("matched"))
        if not ids or len(ids) > request.sampling.max_tokens:
            raise Fault("empty", Action.RETRY, f"{len(ids)} tokens, max_new_tokens is {request.sampling.max_tokens}")
        return Answer(ids, kind, facts=_facts(meta, server))

    def payload(self, request: Request) -> dict[str, Any]:
        """The body of a request. Sampled answers get a seed of their own, which a server may or may not honour."""
        sampling = request.sampling
        params: dict[str, Any] = {
            "max_new_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop_token_ids": self.stop_ids,
            "skip_special_tokens": False,
        }
        if sampling.temperature > 0:
            params["sampling_seed"] = answer_seed(request.seed, request.prompt_ids)
        return {"input_ids": request.prompt_ids, "sampling_params": params}

    def worst_case(self, request: Request) -> float:
        return 0.0


def _facts(meta: dict[str, Any], server: Server) -> dict[str, Any]:
    names = ("cached_tokens", "prompt_tokens", "weight_version")
    kept: dict[str, Any] = {name: meta[name] for name in names if name in meta}
    return {"server": server.version, "url": server.url, **kept}
