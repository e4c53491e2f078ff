"""Any OpenAI-compatible server: vLLM, SGLang's chat route, TGI and the like.

The server renders the prompt with its own template. Where it returns token ids (``return_token_ids``), a row holds
those, the prompt's included; elsewhere the text is encoded again and checked (:mod:`eyrie.engines.chat`).
"""

from __future__ import annotations

from typing import Any

from eyrie.engines.base import Answer, Request
from eyrie.engines.chat import Encode, Reply, answer_of, body_of
from eyrie.engines.faults import Action, Fault
from eyrie.engines.line import Line
from eyrie.engines.pool import Server
from eyrie.errors import EyrieError


class OpenAiWire:
    """Speaks ``/chat/completions`` below a base URL that ends in ``/v1``.

    Args:
        model: the name under which the servers know the target.
        encode: text to ids, for servers that return none.
        reasoning: effort to ask for; None leaves it to the server.
    """

    name = "openai"

    def __init__(self, model: str, encode: Encode, reasoning: str | None = None) -> None:
        self.model, self.encode, self.reasoning = model, encode, reasoning

    async def greet(self, line: Line, server: Server) -> None:
        """See that the model is there, and by a real answer of a token whether the server returns ids."""
        listed = await line.get("/models")
        names = [str(entry.get("id")) for entry in listed.get("data") or []] if isinstance(listed, dict) else []
        if names and self.model not in names:
            raise EyrieError(f"{server.url}: serves {', '.join(names[:5])}, not {self.model!r}; mend engine.model")
        probe = {"model": self.model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        timeout = min(line.timeout, 120.0)
        try:
            body = await line.post("/chat/completions", {**probe, "return_token_ids": True}, timeout=timeout)
        except Fault as fault:
            if fault.action is not Action.REFUSE:
                raise
            body = await line.post("/chat/completions", probe, timeout=timeout)  # it does not know the field
        reply = Reply()
        reply.take(body)
        if reply.finish is None:
            raise Fault("empty", Action.RETRY, "a probe brought no answer")
        server.offers_ids = reply.ids is not None
        server.version = f"{body.get('system_fingerprint') or 'openai'}"

    async def ask(self, line: Line, server: Server, request: Request) -> Answer:
        payload = self.payload(request) | ({"return_token_ids": True} if server.offers_ids else {})
        reply = Reply()
        reply.take(await line.post("/chat/completions", payload))
        return answer_of(reply, request, self.encode, {"server": server.version, "url": server.url})

    def payload(self, request: Request) -> dict[str, Any]:
        """The body of a request."""
        body = body_of(self.model, request, "reasoning_content")
        return body | ({"reasoning_effort": self.reasoning} if self.reasoning else {})

    def worst_case(self, request: Request) -> float:
        return 0.0
