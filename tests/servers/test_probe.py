"""What the supervisor reads from logs, ports and devices."""

from __future__ import annotations

import socket
from pathlib import Path

from eyrie.servers.memory import SLACK_BYTES, not_returned, used_bytes, wait_until_returned
from eyrie.servers.probe import LogReader
from eyrie.servers.process import free_ports

STARTED = "[2026-12-01 16:43:19] max_total_num_tokens=16384, chunked_prefill_size=4096, max_prefill_tokens=16384\n"
DECODED = "[2026-12-01 16:46:02] Decode batch, #running-req: 8, accept len: 1.62, gen throughput (token/s): 15.21, #q\n"


def test_the_log_is_followed_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    reader = LogReader(path, 0)
    reader.read()  # not there yet
    path.write_text(STARTED + DECODED[:60])
    reader.read()
    assert (reader.pool_tokens, reader.tokens_per_s) == (16384, None)
    with path.open("a") as file:
        file.write(DECODED[60:])
    reader.read()
    assert reader.tokens_per_s == 15.21
    assert not reader.port_taken


def test_the_smallest_pool_of_all_ranks_counts(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("[TP0] max_total_num_tokens=900, x\n[TP1] max_total_num_tokens=880, x\n")
    reader = LogReader(path, 0)
    reader.read()
    assert reader.pool_tokens == 880


def test_an_earlier_start_in_the_same_log_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text(STARTED)
    reader = LogReader(path, path.stat().st_size)
    reader.read()
    assert reader.pool_tokens is None


def test_ports_are_free_and_kept_while_they_are() -> None:
    first = free_ports(2)
    assert len(set(first)) == 2
    assert free_ports(2, first) == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first[0]))
        taken.listen()
        assert first[0] not in free_ports(2, first)


def test_memory_is_watched_until_it_is_back() -> None:
    before = {0: 1 << 30, 1: 0}
    readings = [{0: 40 << 30, 1: 0}, {0: 20 << 30, 1: 0}, {0: (1 << 30) + SLACK_BYTES, 1: 0}]
    assert wait_until_returned(before, 10.0, lambda gpus: readings.pop(0) if len(readings) > 1 else readings[0]) == ""
    held = wait_until_returned(before, 0.0, lambda gpus: {0: 3 << 30, 1: 0})
    assert held == "device memory did not come back within 0 s of the server's end (GPU 0: 2048 MiB)"
    assert not_returned(before, {0: 1 << 30, 1: SLACK_BYTES + 1}) == {1: SLACK_BYTES + 1}
    assert used_bytes(()) == {}
