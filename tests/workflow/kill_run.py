"""A small workflow whose target answers through a server that Eyrie starts, and a hand that kills its parts."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from eyrie.config import load_config
from eyrie.formats.jsonl import read_jsonl
from eyrie.formats.manifest import manifest_path
from eyrie.generate.stage import generate
from eyrie.recipes import recipe
from eyrie.servers.process import wait_for
from tests.conftest import build_target
from tests.generate_desk import FakeEngine
from tests.servers.fake_python import write_python

ROOT = Path(__file__).resolve().parents[2]
VICTIMS = ("server", "worker", "workflow")
TOKENS_PER_KILL = 600


class KillRun:
    """A folder with a run of nothing but answers: a tiny target, one dataset, a fake server under the real supervisor.

    Args:
        kills: how many there will be; the work is enough for them.
        token_s: seconds that the server takes for a token.
    """

    def __init__(self, folder: Path, kills: int, shards: int = 1, token_s: float = 0.03) -> None:
        self.folder, self.shards = folder.resolve(), shards
        budget = -(-TOKENS_PER_KILL * (kills + 1) // shards)
        prompts = budget // 8
        build_target(folder / "model")
        with (folder / "prompts.jsonl").open("w") as file:
            file.writelines(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(prompts * shards))
        dataset = {
            "adapter": "jsonl", "path": "prompts.jsonl", "token_budget": budget * shards, "tokens_per_shard": budget,
            "prompts_per_shard": prompts,
        }  # fmt: skip
        server = {"python": str(write_python(self.folder, token_s)), "device": "cpu", "idle_s": 2.0}
        config = {
            "run": "killed", "target": {"model": "model"}, "engine": {"kind": "sglang"}, "server": server,
            "sampling": {"max_tokens": 24}, "datasets": {"questions": dataset},
        }  # fmt: skip
        (folder / "config.yaml").write_text(yaml.safe_dump(config))

    # ---- running ----
    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(ROOT / "Snakefile"), "--cores", "2"]
        with (self.folder / "snakemake.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *(arguments or ("responses",)), "--configfile", "config.yaml"],
                cwd=self.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
            )  # fmt: skip

    def said(self) -> str:
        return (self.folder / "snakemake.log").read_text()[-8000:]

    def asked(self) -> list[tuple[int, ...]]:
        """Every prompt that the server was ever asked, in order."""
        return _json_lines(self.folder / "asked")

    def _count_asked(self) -> int:
        path = self.folder / "asked"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def held(self) -> set[tuple[int, ...]]:
        """Prompts whose answers are in a journal."""
        found: set[tuple[int, ...]] = set()
        for path in self.folder.glob("results/killed/journal/*/*.jsonl"):
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # the line that a kill cut off
                    found.add(tuple(json.loads(line).get("prompt_ids", ())))
        return found - {()}

    def processes(self) -> dict[int, list[bytes]]:
        """Process ids and command lines of all that works in or for this folder."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or int(entry.name) == os.getpid():
                    continue
                line = (entry / "cmdline").read_bytes()
                if (entry / "cwd").readlink() == self.folder or bytes(self.folder) in line:
                    found[int(entry.name)] = line.split(b"\0")
        return found

    def workers(self) -> list[int]:
        """Process ids of the generate jobs of this folder."""
        lines = self.processes().items()
        return [pid for pid, line in lines if len(line) > 1 and line[1].endswith(b"generate_responses.py")]

    def servers(self) -> list[int]:
        path = self.folder / "pids"
        pids = list(map(int, path.read_text().split())) if path.exists() else []
        return [pid for pid in pids if Path(f"/proc/{pid}").exists()]

    # ---- killing ----
    def disturb(self, kills: int, seed: int = 0) -> dict[str, Any]:
        """Kill server, worker and workflow in turn, at random moments, and say the same command until it is done.

        Returns ``kills`` by victim; ``starts`` of the workflow; ``lost``, ``doubled``: rows that are missing from the
        shards or stand there more than once; ``bought_twice``: prompts that were asked for although their answers were
        in the journal; ``left``: processes that outlived the run; ``identical``: shards that equal undisturbed ones,
        out of ``shards``.
        """
        draw, done, bought_twice, starts = random.Random(seed), Counter[str](), 0, 0
        while True:
            held, asked, starts, hit = self.held(), self._count_asked(), starts + 1, set[str]()
            process = self.start()
            while done.total() < kills and process.poll() is None:
                victim = VICTIMS[done.total() % len(VICTIMS)]
                if self._kill(victim, process, draw):
                    done[victim] += 1
                    hit.add(victim)
            process.wait()
            bought_twice += len(held & set(self.asked()[asked:]))
            if process.returncode == 0:
                break
            assert process.returncode == (-signal.SIGKILL if "workflow" in hit else 1), self.said()
            assert hit & {"workflow", "worker"}, "a death of the server ended the run: " + self.said()
        wait_for(lambda: not self.processes(), 20.0)
        return {
            "kills": dict(done), "starts": starts, **self._compared(), "bought_twice": bought_twice,
            "left": len(self.processes()), "shards": self.shards,
        }  # fmt: skip

    def _compared(self) -> dict[str, int]:
        """The shards beside undisturbed ones."""
        found = Counter[str](lost=0, doubled=0, identical=0)
        for shard in self.shard_names():
            found["identical"] += self.published(shard) == self.calm(shard)
            rows = Counter(row["id"] for row in read_jsonl(self.out(shard)))
            wanted = Counter(row["id"] for row in read_jsonl(self.calm_out(shard)))
            found["lost"] += (wanted - rows).total()
            found["doubled"] += rows.total() - len(rows)
        return dict(found)

    def _kill(self, victim: str, process: subprocess.Popen[bytes], draw: random.Random) -> bool:
        """Wait until answers come, then for a random while, then kill; False when the run ended before."""
        asked = self._count_asked()
        while process.poll() is None and not (self._count_asked() > asked and self.workers()):
            time.sleep(0.05)
        time.sleep(draw.uniform(0.0, 0.6))
        pids = {"workflow": [process.pid], "worker": self.workers(), "server": self.servers()}[victim]
        if process.poll() is not None or not pids:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)
            if victim == "workflow":
                process.wait()
            return True
        return False

    # ---- what came out ----
    def shard_names(self) -> list[str]:
        return [f"s{number:04d}" for number in range(self.shards)]

    def out(self, shard: str) -> Path:
        return self.folder / f"results/killed/responses/questions/{shard}.jsonl.zst"

    def calm_out(self, shard: str) -> Path:
        return self.folder / f"calm/questions/{shard}.jsonl.zst"

    def published(self, shard: str) -> tuple[bytes, bytes]:
        return self.out(shard).read_bytes(), manifest_path(self.out(shard)).read_bytes()

    def calm(self, shard: str) -> tuple[bytes, bytes]:
        """The same shard, made in this process by an engine that nobody disturbs."""
        out = self.calm_out(shard)
        made_of = recipe(load_config(self.folder / "config.yaml"), "generate", dataset="questions", shard=shard)
        generate(
            made_of, prompts=self.folder / f"data/prompts/questions/{shard}.jsonl.zst",
            target=self.folder / "results/killed/target.json", model=str(self.folder / "model"), out=out,
            journal=self.folder / f"calm/journal/{shard}.jsonl", engine=FakeEngine,
        )  # fmt: skip
        return out.read_bytes(), manifest_path(out).read_bytes()


def _json_lines(path: Path) -> list[tuple[int, ...]]:
    if not path.exists():
        return []
    whole = path.read_text().rpartition("\n")[0]
    return [tuple(json.loads(line)) for line in whole.splitlines()]
