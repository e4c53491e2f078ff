"""What follows from what a server says, and what a dollar cap, a pool and a back-off do."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyrie.engines.faults import MAX_WAIT, Action, fault_of, retry_after
from eyrie.engines.money import Purse
from eyrie.engines.pool import Closed, Pool
from eyrie.errors import EyrieError


def body(code: Any, **more: Any) -> dict[str, Any]:
    return {"error": {"code": code, "message": "no", **more}, "choices": None}


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (400, Action.REFUSE), (401, Action.STOP), (402, Action.STOP), (403, Action.REFUSE), (404, Action.STOP),
        (408, Action.RETRY), (413, Action.REFUSE), (422, Action.REFUSE), (429, Action.WAIT), (500, Action.RETRY),
        (502, Action.RETRY), (503, Action.WAIT), (504, Action.RETRY), (524, Action.RETRY), (529, Action.WAIT),
    ],
)  # fmt: skip
def test_every_documented_code_as_status_and_inside_a_200(code: int, action: Action) -> None:
    for status, said in ((code, code), (200, code), (200, str(code)), (code, "odd")):
        fault = fault_of(status, body(said), {})
        assert fault is not None
        assert (fault.kind, fault.action, fault.cost) == (str(code), action, 0.0)
    # a status alone says as much
    fault = fault_of(code, "<html>no</html>", {})
    assert fault is not None
    assert (fault.action, fault.text) == (action, "<html>no</html>")


@pytest.mark.parametrize(
    ("said", "action"),
    [
        (body(502, metadata={"error_type": "rate_limit_exceeded"}), Action.WAIT),
        (body(500, metadata={"error_type": "provider_overloaded"}), Action.WAIT),
        (body(400, metadata={"error_type": "provider_unavailable"}), Action.WAIT),
        (body(500, metadata={"error_type": "context_length_exceeded"}), Action.REFUSE),
        (body(429, metadata={"error_type": "payment_required"}), Action.STOP),
        (body(502, metadata={"error_type": "content_policy_violation"}), Action.REFUSE),
        (body(502, metadata={"error_type": "unmapped"}), Action.RETRY),
        (body(502, message="Your input was flagged"), Action.REFUSE),
        (body("insufficient_quota"), Action.STOP),
        (body("server_error"), Action.RETRY),
        (body(500, availability={"retryable": False}), Action.REFUSE),
        (body(400, availability={"retryable": True}), Action.RETRY),
        (body(402, availability={"retryable": True}), Action.STOP),
        ({"error": "broken"}, Action.RETRY),
        ({"object": "error", "message": "too long", "code": 400}, Action.REFUSE),
    ],
)
def test_what_is_more_exact_than_the_code_decides(said: dict[str, Any], action: Action) -> None:
    fault = fault_of(200, said, {})
    assert fault is not None
    assert fault.action is action


def test_an_answer_is_no_fault() -> None:
    for fine in ({"choices": []}, {"error": None, "choices": [1]}, {"error": ""}, {}, [1], "text"):
        assert fault_of(200, fine, {}) is None


def test_retry_after_as_seconds_as_date_by_the_servers_own_clock_and_as_nonsense() -> None:
    assert retry_after({"Retry-After": "7"}) == 7.0
    date = {"Retry-After": "Wed, 21 Oct 2015 07:28:30 GMT", "Date": "Wed, 21 Oct 2015 07:28:00 GMT"}
    assert retry_after(date) == 30.0
    assert retry_after({"Retry-After": "1e9"}) == MAX_WAIT
    assert retry_after({"Retry-After": "-5"}) == 0.0
    assert retry_after({"Retry-After": "soon"}) is None
    assert retry_after({}) is None
    fault = fault_of(200, body(429, availability={"retryable": True, "retry_after": 3}), {"Retry-After": "7"})
    assert fault is not None
    assert fault.after == 3.0


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([429, "error"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "code", "message", "metadata", "availability", "retryable", "usage", "cost"]),
            inner,
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from([200, 400, 429, 500]), JSON)
@settings(max_examples=50, deadline=None)
def test_no_body_of_any_shape_is_a_crash(status: int, said: Any) -> None:
    fault = fault_of(status, said, {})
    assert status == 200 or fault is not None
    if fault is not None:
        assert "\n" not in fault.text


@given(
    cap=st.integers(1, 60),
    rows=st.lists(st.tuples(st.integers(1, 20), st.none() | st.integers(0, 20)), max_size=25),
    killed=st.integers(0, 25),
)
@settings(max_examples=60, deadline=None)
def test_no_order_of_requests_passes_the_cap_not_even_with_kills(
    cap: int, rows: list[tuple[int, int | None]], killed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "dollars.json"
        purses = [Purse(ledger, "a/s0", float(cap)), Purse(ledger, "a/s1", float(cap))]
        spent = 0.0
        for number, (worst, cost) in enumerate(rows):
            if number == killed:  # nobody settles what it had reserved
                lost = json.loads(ledger.read_text())["reserved"].get("a/s0", 0.0) if ledger.exists() else 0.0
                purses[0] = Purse(ledger, "a/s0", float(cap))
                spent += lost
            purse = purses[number % 2]
            if not purse.reserve(float(worst)):
                continue
            assert spent + worst <= cap
            if number % 3 == 0 and number < killed and number % 2 == 0:
                continue  # in flight when the kill comes
            paid = None if cost is None else min(cost, worst)
            purse.settle(float(worst), None if paid is None else float(paid))
            spent += worst if paid is None else paid
        book = json.loads(ledger.read_text()) if ledger.exists() else {"spent": 0.0, "reserved": {}}
        assert book["spent"] + sum(book["reserved"].values()) <= cap + 1e-9
        assert book["spent"] == pytest.approx(spent)


def test_a_broken_ledger_is_no_licence_to_spend(tmp_path: Path) -> None:
    (tmp_path / "dollars.json").write_text("")
    with pytest.raises(EyrieError, match=r"dollars\.json: is no ledger .*; the journals beside it hold the cost"):
        Purse(tmp_path / "dollars.json", "a", 1.0)


def test_a_busy_server_gets_less_and_recovers_by_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(["http://a", "http://b"], 16, lambda: None)
    assert pool.capacity == 0
    pool.put_back(pool.servers[0])
    assert pool.capacity == 16
    for _ in range(5):  # one cut in a moment, however many say so
        pool.servers[0].busy()
    assert pool.capacity == 11
    monkeypatch.setattr("eyrie.engines.pool.CUT_EVERY", 0.0)
    for _ in range(50):
        pool.servers[0].busy()
    assert pool.capacity == 1
    for _ in range(200):
        pool.servers[0].answered(16)
    assert pool.capacity == 16


def test_places_go_to_the_least_busy_and_end_when_the_pool_closes() -> None:
    async def play() -> None:
        pool = Pool(["http://a", "http://b"], 2, lambda: None)
        waiting = asyncio.create_task(pool.place())
        await asyncio.sleep(0)
        for server in pool.servers:
            pool.put_back(server)
        first = await waiting
        second = await pool.place()
        assert {first.url, second.url} == {"http://a", "http://b"}
        for server in pool.servers:
            server.limit = 1.0
        third = asyncio.create_task(pool.place())
        await asyncio.sleep(0)
        assert not third.done()
        pool.give_back(second)
        assert await third is second
        last = asyncio.create_task(pool.place())
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(Closed):
            await last

    asyncio.run(play())
