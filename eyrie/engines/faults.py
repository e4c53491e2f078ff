"""What can go wrong with one request, and what to do about it.

Servers say it in many places: the HTTP status, a body ``{"error": {...}}`` under status 200, an event in the middle of
a stream. All of it becomes one :class:`Fault`, whose action is decided here and nowhere else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Any

MAX_WAIT = 300.0  # seconds; a longer Retry-After is not believed


class Action(Enum):
    """What follows from a fault.

    ``RETRY`` counts against the row's tries. ``WAIT`` does not: the server is busy, which says nothing about the
    prompt. ``DOWN`` takes the server out of the pool. ``REFUSE`` ends the row without an answer. ``STOP`` ends the
    stage, resumably.
    """

    RETRY = "retry"
    WAIT = "wait"
    DOWN = "down"
    REFUSE = "refuse"
    STOP = "stop"


_BY_CODE = {
    400: Action.REFUSE, 401: Action.STOP, 402: Action.STOP, 403: Action.REFUSE, 404: Action.STOP, 405: Action.STOP,
    413: Action.REFUSE, 422: Action.REFUSE, 408: Action.RETRY, 429: Action.WAIT, 503: Action.WAIT, 529: Action.WAIT,
}  # fmt: skip
# `error.metadata.error_type` is more exact than the code, which providers choose freely.
_BY_TYPE = {
    "rate_limit_exceeded": Action.WAIT,
    "provider_overloaded": Action.WAIT,
    "provider_unavailable": Action.WAIT,
    "payment_required": Action.STOP,
    "authentication": Action.STOP,
    "context_length_exceeded": Action.REFUSE,
    "content_policy_violation": Action.REFUSE,
    "refusal": Action.REFUSE,
    "timeout": Action.RETRY,
    "server": Action.RETRY,
    # names that other servers put into `error.code` or `error.type`
    "insufficient_quota": Action.STOP,
    "invalid_api_key": Action.STOP,
    "model_not_found": Action.STOP,
    "content_filter": Action.REFUSE,
}


class Fault(Exception):
    """A request that brought no answer.

    Attributes:
        kind: short name for counting: the code, or ``timeout``, ``dropped``, ``unreachable``, ``empty``, ...
        action: what to do.
        text: what the server said, on one line.
        after: seconds the server asked us to wait, if it did.
        cost: dollars it cost; None when nobody can know, so that the worst case must be booked.
    """

    def __init__(
        self, kind: str, action: Action, text: str = "", *, after: float | None = None, cost: float | None = None
    ) -> None:
        super().__init__(f"{kind}: {text}" if text else kind)
        self.kind, self.action, self.text, self.after, self.cost = kind, action, text, after, cost


def fault_of(status: int, body: Any, headers: Mapping[str, str]) -> Fault | None:
    """The fault that an HTTP answer says, or None when it is none.

    Args:
        status: HTTP status.
        body: the JSON body or event (any shape), or the text of one that is no JSON.
        headers: response headers, for ``Retry-After``.
    """
    error = _error_in(body)
    if error is None and 200 <= status < 300:
        return None
    if error is None:
        text = body if isinstance(body, str) else json.dumps(body)
        error = {"message": text or "no reason given"}
    code = number(error.get("code"))
    code = int(code) if code is not None and 400 <= code < 600 else status if status >= 400 else 500
    metadata, availability = _section(error, "metadata"), _section(error, "availability")
    text = " ".join(f"{error.get('message') or ''} {metadata.get('raw') or ''}".split())[:300]
    named = (metadata.get("error_type"), error.get("code"), error.get("type"))
    action = next((_BY_TYPE[name] for name in named if isinstance(name, str) and name in _BY_TYPE), None)
    action = action or _BY_CODE.get(code, Action.RETRY)
    if "flagged" in text.lower() and action is not Action.STOP:
        action = Action.REFUSE  # providers hide moderation behind a 502
    if isinstance(availability.get("retryable"), bool) and action is not Action.STOP:
        retryable = availability["retryable"]
        action = Action.REFUSE if not retryable else Action.RETRY if action is Action.REFUSE else action
    after = number(availability.get("retry_after"))
    usage = body.get("usage") if isinstance(body, dict) else None
    return Fault(
        str(code),
        action,
        text,
        after=_clamped(after) if after is not None else retry_after(headers),
        cost=number(usage.get("cost")) or 0.0 if isinstance(usage, dict) else 0.0,
    )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds of a ``Retry-After`` header, given as a number or as a date. The server's own clock counts, not ours."""
    value = headers.get("Retry-After")
    if value is None:
        return None
    seconds = number(value)
    if seconds is None:
        try:
            until = parsedate_to_datetime(value).timestamp()
            now = parsedate_to_datetime(headers["Date"]).timestamp() if "Date" in headers else time.time()
        except (TypeError, ValueError):
            return None
        seconds = until - now
    return _clamped(seconds)


def _error_in(body: Any) -> dict[str, Any] | None:
    """The error object of a body, in any of the forms that servers use."""
    if not isinstance(body, dict):
        return None
    error = body.get("error")
    if isinstance(error, dict):
        return error
    if isinstance(error, str) and error:
        return {"message": error}
    if body.get("object") == "error":
        return body
    return None


def _section(error: dict[str, Any], name: str) -> dict[str, Any]:
    found = error.get(name)
    return found if isinstance(found, dict) else {}


def number(value: Any) -> float | None:
    """A finite number that a server gave, also as text; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if found == found and abs(found) != float("inf") else None


def _clamped(seconds: float) -> float:
    return min(max(seconds, 0.0), MAX_WAIT)
