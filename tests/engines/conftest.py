"""What tests of served engines share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eyrie.engines import http
from tests.fake_server import FAST, FakeServer


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off in milliseconds."""
    made = http.Patience
    monkeypatch.setattr(http, "Patience", lambda *args: made(*args, first_wait=0.01, longest_wait=0.05))
    monkeypatch.setattr("eyrie.engines.pool.CUT_EVERY", 0.05)


@pytest.fixture
def paid(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Options for OpenRouter, played by a server of ours."""

    def options(server: FakeServer, *, openrouter: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        monkeypatch.setenv("OPENROUTER_BASE_URL", f"{server.url}/v1")
        monkeypatch.setenv("OPENROUTER_API_KEY", server.key or "sk-any")
        pins = {"providers": ["Alpha"], "quantizations": ["int4"]} | (openrouter or {})
        return {"kind": "openrouter", "model": "maker/model", "openrouter": pins, "max_dollars": 5.0, **FAST, **more}

    return options
