"""Asking a server: is it ours, does it really generate, what did it say in its log."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# "max_total_num_tokens=8192, ..." and "Decode batch, ... gen throughput (token/s): 30.12, ..."
POOL = re.compile(r"max_total_num_tokens\s*[=:]\s*(\d+)")
THROUGHPUT = re.compile(r"gen throughput \(token/s\):\s*([0-9.]+)")
PORT_TAKEN = re.compile(r"address already in use|Errno 98\b", re.IGNORECASE)

# a proxy named in the environment must never see a request to this machine
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, body: dict[str, Any] | None = None, timeout: float = 60.0) -> Any:
    """GET, or POST ``body``; the answer as JSON.

    Raises:
        OSError: no connection, a time-out, or a status other than 2xx (``urllib.error.HTTPError``).
        ValueError: the answer is no JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _OPENER.open(request, timeout=timeout) as response:
            return json.load(response)
    except http.client.HTTPException as error:  # cut off in the middle of an answer
        raise ConnectionError(f"{url}: {type(error).__name__}") from error


def served_names(url: str, timeout: float = 10.0) -> list[str]:
    """Names of the models that the server says it serves."""
    return [str(model.get("id")) for model in ask(f"{url}/v1/models", timeout=timeout).get("data", [])]


def generates(url: str, probe_ids: Sequence[int], timeout: float = 120.0) -> bool:
    """Whether a real request gives a token: a server can be healthy and answer nothing."""
    body = {"input_ids": list(probe_ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    return bool(ask(f"{url}/generate", body, timeout=timeout).get("output_ids"))


def version_of(url: str) -> str:
    """The server's own version; empty when it does not say."""
    try:
        return str(ask(f"{url}/server_info", timeout=10.0).get("version", ""))
    except (OSError, ValueError):
        return ""


class LogReader:
    """Follows a server's log from byte ``start`` on.

    Attributes:
        pool_tokens: key-value tokens of the smallest pool named so far (every rank names its own).
        tokens_per_s: the last generation throughput.
        port_taken: whether it could not bind its port.
    """

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.place, self._rest = path, start, ""
        self.pool_tokens: int | None = None
        self.tokens_per_s: float | None = None
        self.port_taken = False

    def read(self) -> None:
        """Take in what was written since the last call; a line still being written waits."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.place)
                data = file.read()
        except FileNotFoundError:
            return
        self.place += len(data)
        *lines, self._rest = (self._rest + data.decode(errors="replace")).split("\n")
        for line in lines:
            if found := POOL.search(line):
                tokens = int(found[1])
                self.pool_tokens = tokens if self.pool_tokens is None else min(self.pool_tokens, tokens)
            if found := THROUGHPUT.search(line):
                self.tokens_per_s = float(found[1])
            self.port_taken = self.port_taken or bool(PORT_TAKEN.search(line))
