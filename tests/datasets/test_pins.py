"""Commits of hub datasets: asked of a hub of ours, written into configs, and demanded by ingest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from eyrie.config import load_config
from eyrie.datasets import find_adapter, ingest
from eyrie.datasets.pins import pin_datasets
from eyrie.errors import EyrieError
from eyrie.formats.manifest import verified_manifest

ROOT = Path(__file__).parents[2]
CHAT, MATHS, GSM = "mlabonne/open-perfectblend", "allenai/math_qa", "openai/gsm8k"
OLD, NEW, BRANCH, DIGITS = "a" * 40, "b" * 40, "c" * 40, "1" * 40

CONFIG = """\
# Ganz oben: ä
run:   mine    # three blanks
target: {model: x/y}

datasets:
  # A chat.
  chat:
    adapter: perfectblend   # its rows are long
    # so many tokens
    token_budget: 10

  maths:
    "adapter": math-qa
    revision: 'main'     # moves
    token_budget: 10
  kept:
    revision: REVISION
    adapter: gsm8k
    token_budget: 10
  flow: {adapter: gsm8k, token_budget: 10}
  empty:
    token_budget: 10
    repo: "openai/gsm8k"
    adapter: columns
    revision:            # still to come
    options: {prompt: question}
  package:
    adapter: chitchat
    token_budget: 10
  file:
    adapter: gsm8k
    path: mine.jsonl
    token_budget: 10

tokenize:
    max_length: 1024
""".replace("REVISION", OLD)


class Hub(ThreadingHTTPServer):
    """Answers ``/api/datasets/<id>[/revision/<name>]`` as the hub does, with its error codes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Desk)
        self.commits: dict[tuple[str, str | None], str | None] = {}
        self.gated: dict[str, str] = {}
        self.closed: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str | None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Desk(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if not path.startswith("/api/datasets/"):
            return self.answer(404, {"error": "not here"})
        repo, _, name = path.removeprefix("/api/datasets/").partition("/revision/")
        revision = unquote(name) or None
        self.server.asked.append((repo, revision))
        if repo in self.server.closed:
            code, error = self.server.closed[repo]
            return self.answer(code, {"error": error}, error)
        if (repo, revision) in self.server.commits:
            facts = {
                "id": repo,
                "sha": self.server.commits[repo, revision],
                "gated": self.server.gated.get(repo, False),
            }
            return self.answer(200, {**facts, "private": False, "tags": [], "siblings": [{"rfilename": "a.jsonl"}]})
        known = any(repo == other for other, _ in self.server.commits)
        return self.answer(404, {"error": "none"}, "RevisionNotFound" if known else "RepoNotFound")

    def answer(self, status: int, body: dict[str, Any], code: str = "") -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that knows three datasets, in place of the real one."""
    with Hub() as made:
        made.commits = {(CHAT, None): NEW, (MATHS, "main"): BRANCH, (MATHS, None): NEW, (GSM, None): DIGITS}
        Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", made.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield made
        made.shutdown()


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.yaml"
    path.write_bytes(text.encode())
    return path


def pinned(path: Path) -> list[str]:
    lines: list[str] = []
    pin_datasets(path, lines.append)
    return lines


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_every_byte_but_the_pins_stays(line_end: str, hub: Hub, tmp_path: Path) -> None:
    path = written(tmp_path, CONFIG.replace("\n", line_end))
    path.chmod(0o640)
    assert pinned(path) == [
        f"chat: {CHAT} is pinned to {NEW}",
        f"maths: {MATHS} is pinned to {BRANCH}",
        f"kept: {GSM} stays at {OLD}",
        f"flow: {GSM} is pinned to {DIGITS}",
        f"empty: {GSM} is pinned to {DIGITS}",
        "package: not of the hub",
        "file: not of the hub",
    ]
    expected = CONFIG
    for old, new in (
        ("    # so many tokens\n", f"    revision: {NEW}\n    # so many tokens\n"),
        ("revision: 'main' ", f"revision: {BRANCH} "),
        ("{adapter: gsm8k,", f'{{revision: "{DIGITS}", adapter: gsm8k,'),  # bare, forty digits would be a number
        ("revision:            #", f'revision: "{DIGITS}"            #'),
    ):
        assert expected.count(old) == 1
        expected = expected.replace(old, new)
    assert path.read_bytes() == expected.replace("\n", line_end).encode()
    assert path.stat().st_mode & 0o777 == 0o640
    assert hub.asked == [(CHAT, None), (MATHS, "main"), (GSM, None), (GSM, None)]
    assert sorted(tmp_path.iterdir()) == [path]

    before = path.stat().st_mtime_ns
    hub.asked.clear()
    assert pinned(path)[0] == f"chat: {CHAT} stays at {NEW}"
    assert (hub.asked, path.stat().st_mtime_ns) == ([], before)


def test_a_file_without_a_last_line_end(hub: Hub, tmp_path: Path) -> None:
    text = "run: a\ntarget: {model: x/y}\ndatasets:\n  chat:\n      token_budget: 1\n      adapter: perfectblend"
    path = written(tmp_path, text)
    pinned(path)
    assert path.read_text() == f"{text}\n      revision: {NEW}"


def test_what_the_hub_refuses_is_one_line_each_and_the_rest_is_written(hub: Hub, tmp_path: Path) -> None:
    text = CONFIG.replace("adapter: gsm8k\n    path: mine.jsonl", "adapter: columns\n    repo: no/such")
    text += "".join(
        f"  {name}:\n    adapter: columns\n    repo: {repo}\n    token_budget: 1\n    revision: {revision}\n"
        for name, repo, revision in (
            ("walled", "a/walled", "main"),
            ("tagged", MATHS, "v9"),
            ("folder", "./data/mine", "main"),
            ("blank", "a/blank", "main"),
            ("open", "a/gated", "main"),
        )
    )
    text = text.replace("\ntokenize:\n    max_length: 1024\n", "")
    hub.closed["a/walled"] = (403, "GatedRepo")
    hub.commits["a/blank", "main"] = None
    hub.commits["a/gated", "main"] = OLD
    hub.gated["a/gated"] = "auto"
    path = written(tmp_path, text)
    lines: list[str] = []
    with pytest.raises(EyrieError, match=r"mine\.yaml: 5 of its datasets not pinned; mend what their lines say"):
        pin_datasets(path, lines.append)
    said = dict(line.split(": ", 1) for line in lines)
    assert not any("\n" in line for line in lines)
    assert said["file"].startswith("no/such is NOT pinned: the hub has no such dataset, or a private one; mend `repo`")
    terms = f"accept its terms at {hub.endpoint}/datasets/a"
    assert said["walled"] == f"a/walled is NOT pinned: it is gated; {terms}/walled and log in with `hf auth login`"
    assert said["tagged"] == f"{MATHS} is NOT pinned: it has no revision 'v9'; mend or remove `revision`"
    assert said["folder"].endswith("no name on the hub; for a folder set `path` in place of `repo`")
    assert "the hub named no commit" in said["blank"]
    assert said["open"] == f"a/gated is pinned to {OLD}; it is gated: {terms}/gated and log in with `hf auth login`"
    revisions = {name: dataset.revision for name, dataset in load_config(path).datasets.items()}
    assert (revisions["chat"], revisions["maths"], revisions["open"]) == (NEW, BRANCH, OLD)
    assert (revisions["file"], revisions["walled"], revisions["tagged"]) == (None, "main", "v9")


@pytest.mark.parametrize("fault", ["closed", "busy", "no hub", "offline"])
def test_a_hub_that_does_not_answer_leaves_the_file_as_it_was(
    fault: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, CONFIG)
    message = rf"{hub.endpoint}: no answer about {MATHS} \(\w+: .*\); mend the connection.*nothing was written"
    if fault == "closed":
        hub.shutdown()
        hub.server_close()
        message = message.replace(MATHS, CHAT)
    elif fault == "busy":
        hub.closed[MATHS] = (503, "")
    elif fault == "no hub":
        monkeypatch.setattr(Desk, "answer", lambda desk, *_: desk.wfile.write(b"HTTP/1.0 200 OK\r\n\r\n<html>"))
        message = message.replace(MATHS, CHAT)
    else:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        message = "offline mode is on; unset HF_HUB_OFFLINE; nothing was written"
    lines: list[str] = []
    with pytest.raises(EyrieError, match=message) as caught:
        pin_datasets(path, lines.append)
    assert "\n" not in str(caught.value)
    assert lines == []
    assert path.read_bytes() == CONFIG.encode()


@pytest.mark.parametrize(
    "datasets",
    [
        # The pin would reach the second section too, which reads a file.
        "  a: &a\n    adapter: perfectblend\n    token_budget: 1\n  b:\n    <<: *a\n    path: mine.jsonl\n",
        "  a:\n    ? adapter\n    : perfectblend\n    token_budget: 1\n",
        "  <<: {a: {adapter: perfectblend, token_budget: 1}}\n",
    ],
    ids=["merged", "explicit", "hidden"],
)
def test_a_file_that_cannot_be_edited_safely_is_left_alone(datasets: str, hub: Hub, tmp_path: Path) -> None:
    text = f"run: a\ntarget: {{model: x/y}}\ndatasets:\n{datasets}"
    path = written(tmp_path, text)
    with pytest.raises(EyrieError, match=rf"cannot be edited safely; set by hand datasets\.a\.revision: {NEW}$"):
        pinned(path)
    assert path.read_text() == text


def test_two_names_of_one_section_are_pinned_once(hub: Hub, tmp_path: Path) -> None:
    text = "run: a\ntarget: {model: x/y}\ndatasets:\n  a: &a\n    adapter: perfectblend\n    token_budget: 1\n  b: *a\n"
    path = written(tmp_path, text)
    pinned(path)
    assert path.read_text() == text.replace("perfectblend\n", f"perfectblend\n    revision: {NEW}\n")
    assert {dataset.revision for dataset in load_config(path).datasets.values()} == {NEW}


def test_the_script_pins_the_kimi_preset(hub: Hub, tmp_path: Path) -> None:
    path = tmp_path / "kimi.yaml"
    shutil.copy(ROOT / "config" / "kimi-k2.5.yaml", path)
    before = path.read_text().splitlines()
    datasets = load_config(path).datasets
    open_ones = [name for name, dataset in datasets.items() if dataset.revision is None]
    hub.commits = {(str(find_adapter(datasets[name].adapter).hub.repo), None): NEW for name in open_ones}
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    ran = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "pin_datasets.py"), str(path)],
        env={**environment, "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert [line.split(":")[0] for line in ran.stdout.splitlines()] == list(datasets)
    assert all(len(str(dataset.revision)) == 40 for dataset in load_config(path).datasets.values())
    after = path.read_text().splitlines()
    assert [line for line in after if line != f"    revision: {NEW}"] == before
    assert len(after) == len(before) + len(open_ones)


def make(folder: Path, **dataset: Any) -> dict[str, Any]:
    out = folder / "s0000.jsonl.zst"
    ingest({"revision": 1, "dataset": {"prompts_per_shard": 2, **dataset}, "shard": 0}, "mine", out)
    return verified_manifest(out, stage="ingest").facts["source"]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Revisions that the `datasets` library was asked for; each is a folder with four questions."""
    revisions: list[str | None] = []

    def load_dataset_builder(*_: Any, revision: str | None, **__: Any) -> Any:
        revisions.append(revision)
        file = tmp_path / f"repo@{revision}" / "a.jsonl"
        file.parent.mkdir()
        file.write_text("".join(json.dumps({"question": f"question {i}", "answer": "a"}) + "\n" for i in range(4)))
        return SimpleNamespace(config=SimpleNamespace(data_files={"train": [str(file)]}))

    monkeypatch.setattr("datasets.load_dataset_builder", load_dataset_builder)
    return revisions


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"adapter": "gsm8k"}, r"openai/gsm8k is not pinned to a commit \(it has no revision\)"),
        ({"adapter": "gsm8k", "revision": "main"}, r"openai/gsm8k .* \(its revision 'main' can move\)"),
        ({"adapter": "gsm8k", "revision": OLD[:12]}, r"\(its revision 'aaaaaaaaaaaa' can move\)"),
        ({"adapter": "math-qa"}, r"allenai/math_qa .* \(its revision 'refs/convert/parquet' can move\)"),
        # Another repository takes no pin from the adapter.
        ({"adapter": "glaive", "repo": "me/copy"}, r"me/copy .* \(it has no revision\)"),
        ({"adapter": "columns", "repo": "me/own", "options": {"prompt": "q"}}, r"me/own .* \(it has no revision\)"),
    ],
)
def test_ingest_refuses_a_dataset_without_a_commit(
    dataset: dict[str, Any], message: str, asked: list[str | None], tmp_path: Path
) -> None:
    mend = r"; run `python scripts/pin_datasets\.py CONFIG` .* writes datasets\.mine\.revision"
    with pytest.raises(EyrieError, match=f"^dataset mine: .*{message}{mend}") as caught:
        make(tmp_path, **dataset)
    assert "\n" not in str(caught.value)
    assert asked == []
    assert list(tmp_path.iterdir()) == []


def test_ingest_reads_a_commit_of_the_config_or_of_the_adapter(asked: list[str | None], tmp_path: Path) -> None:
    place = {"licence": "MIT", "repo": GSM, "subset": "main", "split": "train"}
    assert make(tmp_path, adapter="gsm8k", revision=OLD) == {**place, "revision": OLD}
    with pytest.raises(EyrieError, match="yields no prompt"):  # the rows are not glaive's; its pin was asked for
        make(tmp_path, adapter="glaive")
    assert asked == [OLD, find_adapter("glaive").hub.revision]


def test_an_adapter_that_pins_itself_is_neither_asked_for_nor_written(hub: Hub, tmp_path: Path) -> None:
    text = "run: a\ntarget: {model: x/y}\ndatasets:\n  a:\n    adapter: glaive\n    token_budget: 1\n"
    path = written(tmp_path, text)
    adapter = find_adapter("glaive").hub
    assert pinned(path) == [f"a: {adapter.repo} stays at {adapter.revision}, its adapter's pin"]
    assert hub.asked == []
    assert path.read_text() == text


def test_an_unknown_adapter_is_still_named(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match=r"^dataset mine: no dataset adapter 'gsm9k'; did you mean 'gsm8k'\?"):
        make(tmp_path, adapter="gsm9k")
