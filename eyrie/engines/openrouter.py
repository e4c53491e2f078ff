"""OpenRouter: a paid market of providers behind one chat API.

Routing is pinned, because providers differ in quantisation and template: the same model name would otherwise be several
targets inside one run. Prompts are never shortened, unsupported parameters are errors, reasoning is kept. Money is
checked before the first request and reserved before each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyrie.config import OpenRouter
from eyrie.engines.base import Answer, Request
from eyrie.engines.chat import Encode, Reply, answer_of, body_of
from eyrie.engines.faults import Action, Fault, number
from eyrie.engines.line import Line
from eyrie.engines.money import Outlook
from eyrie.engines.pool import Server
from eyrie.errors import EyrieError

log = logging.getLogger(__name__)

URL = "https://openrouter.ai/api/v1"
MARGIN = 1.2  # credit must cover the estimate so many times
PROMPT_SLACK = 1.25, 64  # the provider's template may render more tokens than ours
SERVING = (0, None)  # `status` of an endpoint that is not degraded


@dataclass(frozen=True)
class Price:
    """Dollars, the dearest of the pinned endpoints."""

    prompt: float
    completion: float
    request: float

    def of(self, prompt: float, completion: float, requests: float = 1.0) -> float:
        return self.prompt * prompt + self.completion * completion + self.request * requests


class OpenRouterWire:
    """Speaks OpenRouter's chat completions, streamed.

    Args:
        model: slug, such as ``moonshotai/kimi-k2.5``.
        options: the ``engine.openrouter`` section.
        encode: text to ids; OpenRouter returns none.
        reasoning: effort to ask for; None leaves it to the model.
        max_tokens: completion tokens of the longest answer.
        outlook: what is left to buy, for the estimate.
        cap: dollars that the run may spend.
    """

    name = "openrouter"

    def __init__(
        self,
        model: str,
        options: OpenRouter,
        encode: Encode,
        *,
        reasoning: str | None,
        max_tokens: int,
        outlook: Callable[[], Outlook],
        cap: float,
    ) -> None:
        self.model, self.options, self.encode, self.reasoning = model, options, encode, reasoning
        self.max_tokens, self.outlook, self.cap = max_tokens, outlook, cap
        self.price: Price | None = None

    async def greet(self, line: Line, server: Server) -> None:
        """Key, provider, price, credit; nothing is bought. Raises :class:`EyrieError` for what waiting cannot mend."""
        key = _data(await line.get("/key"))
        if self.price is None:
            endpoints = _data(await line.get(f"/models/{self.model}/endpoints")).get("endpoints") or []
            self.price = self._price([entry for entry in endpoints if isinstance(entry, dict)])
            left = number(key.get("limit_remaining"))
            try:
                credits_ = _data(await line.get("/credits"))
                balance = (number(credits_.get("total_credits")) or 0.0) - (number(credits_.get("total_usage")) or 0.0)
                left = balance if left is None else min(left, balance)
            except Fault as fault:  # ordinary keys may not look
                log.info("openrouter: the balance of the account cannot be read (%s)", fault.kind)
            self._check_credit(left)
        server.version = "openrouter"

    def _price(self, endpoints: list[dict[str, Any]]) -> Price:
        """The dearest price among the endpoints that the pins leave."""
        wanted = {name.lower() for name in self.options.providers}
        fitting, faults = [], []
        for entry in endpoints:
            names = {str(entry.get("provider_name", "")).lower(), str(entry.get("tag", "")).split("/")[0].lower()}
            if not names & wanted:
                continue
            fault = self._unfit(entry)
            if fault:
                faults.append(f"{entry.get('provider_name')} {fault}")
            else:
                fitting.append(entry)
        if not fitting:
            seen = sorted({f"{e.get('provider_name')} ({e.get('quantization') or 'unknown'})" for e in endpoints})
            raise EyrieError(
                f"engine.openrouter: no endpoint of {self.model} fits ({'; '.join(faults) or 'no such provider'}); "
                f"on offer: {', '.join(seen) or 'none'}"
            )
        prices = [entry.get("pricing") or {} for entry in fitting]

        def dearest(name: str) -> float:
            return max(number(price.get(name)) or 0.0 for price in prices)

        return Price(dearest("prompt"), dearest("completion"), dearest("request"))

    def _unfit(self, entry: dict[str, Any]) -> str | None:
        """Why a pinned provider's endpoint cannot be used."""
        quantization = str(entry.get("quantization") or "unknown")
        if self.options.quantizations and quantization not in self.options.quantizations:
            return f"has quantization {quantization}"
        longest = entry.get("max_completion_tokens")
        if isinstance(longest, int) and longest < self.max_tokens:
            return f"answers with at most {longest} tokens, sampling.max_tokens is {self.max_tokens}"
        supported = entry.get("supported_parameters")
        needed = {"max_tokens", "temperature", "top_p"} | ({"reasoning"} if self.reasoning else set())
        if isinstance(supported, list) and (missing := sorted(needed - set(supported))):
            return f"does not support {', '.join(missing)}"
        pricing = entry.get("pricing")
        if not isinstance(pricing, dict) or number(pricing.get("completion")) is None:
            return "names no price"
        status = entry.get("status")
        return None if status in SERVING else f"has status {status}"

    def _check_credit(self, left: float | None) -> None:
        """Show the estimate; refuse when the credit does not cover it."""
        assert self.price is not None
        outlook = self.outlook()
        fewest = outlook.completion / self.max_tokens
        low = self.price.of(outlook.prompt_tokens * fewest, outlook.completion, fewest)
        high = self.price.of(
            outlook.prompt_tokens * outlook.prompts, outlook.completion + self.max_tokens, outlook.prompts
        )
        log.info(
            "openrouter: %s at $%.2f in and $%.2f out per million tokens; this shard is estimated at $%.4f to $%.4f, "
            "the run's cap is $%.2f, credit left %s",
            self.model, 1e6 * self.price.prompt, 1e6 * self.price.completion, low, max(low, high), self.cap,
            "unlimited" if left is None else f"${left:.2f}",
        )  # fmt: skip
        if left is not None and left < MARGIN * low:
            raise EyrieError(
                f"openrouter: ${left:.4f} of credit is left and this shard is estimated at ${low:.4f} or more; add "
                "credit, raise the key's limit, or lower the dataset's token_budget"
            )

    async def ask(self, line: Line, server: Server, request: Request) -> Answer:
        reply = Reply()
        async for event in line.events("/chat/completions", self.payload(request)):
            reply.take(event)
        usage = reply.facts.get("usage")
        if reply.finish is None and usage is None and (reply.content or reply.reasoning):
            raise Fault("dropped", Action.RETRY, "the stream ended in the middle")
        facts: dict[str, Any] = {"server": server.version}
        cost = number(usage.get("cost")) if isinstance(usage, dict) else None
        if cost is not None:
            facts["cost"] = cost
        return answer_of(reply, request, self.encode, facts)

    def payload(self, request: Request) -> dict[str, Any]:
        """The body of a request; what it pins is what makes answers of one run come from one target."""
        options = self.options
        provider: dict[str, Any] = {
            "only": list(options.providers),
            "allow_fallbacks": len(options.providers) > 1,  # among these, never beyond
            "require_parameters": True,
            "enforce_distillable_text": options.not_distillable is None,
        }
        if options.quantizations:
            provider["quantizations"] = list(options.quantizations)
        body = body_of(self.model, request, "reasoning") | {
            "stream": True,
            "provider": provider,
            # on by default for short contexts, where it would cut prompts without a word
            "plugins": [{"id": "context-compression", "enabled": False}],
        }
        if self.reasoning:
            body["reasoning"] = {"effort": self.reasoning, "exclude": False}
        return body

    def worst_case(self, request: Request) -> float:
        assert self.price is not None, "greet comes first"
        share, more = PROMPT_SLACK
        return self.price.of(len(request.prompt_ids) * share + more, request.sampling.max_tokens)


def _data(body: Any) -> dict[str, Any]:
    data = body.get("data") if isinstance(body, dict) else None
    return data if isinstance(data, dict) else {}
