"""What the files of a run say about its machine's needs and its drafters. A file that is not there says nothing."""

from __future__ import annotations

import base64
import binascii
import json
from pathlib import Path
from typing import Any

from eyrie.config import Config
from eyrie.doctor.readings import Export, Pool, RunFacts
from eyrie.errors import EyrieError
from eyrie.formats.manifest import read_manifest
from eyrie.servers.spec import Files
from eyrie.targets.card import TargetCard, read_card

TRAINING_BYTES = 16
"""Per parameter: float32 weights, two moments, and the best weights so far."""


def cheap_facts(config: Config, run_dir: Path) -> RunFacts:
    """What generation needs to know: no tensor is read and no heavy package imported."""
    card = _card(run_dir / "target.json")
    tokens = [_json(path).get("tokens", {}) for path in run_dir.glob("tokens/*/*.manifest.json")]
    facts: dict[str, Any] = {
        "row_tokens": sum(sum(counts.values()) for counts in tokens),
        "hidden_bytes": sum(path.stat().st_size for path in run_dir.glob("hidden/*/*.safetensors")),
        "hidden_size": _json(Path(config.target.model) / "config.json").get("hidden_size"),
    }
    if card is not None:
        facts |= _of_card(card, config)
    return RunFacts(**facts)


def all_facts(config: Config, run_dir: Path, servers: Path, state: Path = Path(".snakemake")) -> RunFacts:
    """The same and what drafters, servers and Snakemake left behind.

    Args:
        servers: folder with the states of servers that Eyrie started.
        state: Snakemake's own folder.
    """
    return cheap_facts(config, run_dir).model_copy(
        update={
            "exports": {
                name: _export(run_dir, name)
                for name in config.drafters
                if (run_dir / "export" / name / "sglang" / "config.json").is_file()
            },
            "pools": tuple(_pool(path.parent) for path in sorted(servers.glob("*/state.json"))),
            "incomplete": tuple(
                sorted(name for path in _files(state / "incomplete") if (name := _output(path, state)))
            ),
            "locked": bool(_files(state / "locks")),
        }
    )


def _card(path: Path) -> TargetCard | None:
    try:
        return read_card(path)
    except EyrieError:
        return None


def _of_card(card: TargetCard, config: Config) -> dict[str, Any]:
    rendering = card.rendering
    lost = [
        name
        for name, fate in (("turns", rendering.own_reasoning), ("turns with calls", rendering.own_reasoning_with_calls))
        if fate == "lost" and rendering.prompt_opens_think
    ]
    faults = () if rendering.boundary == "stable" else (f"chat turns are rejected: {rendering.boundary}",)
    notes = [f"reasoning of {name} is lost, such rows are left out" for name in lost]
    each = TRAINING_BYTES * parameters(card, config.merge.draft_vocab_size)
    return {
        "identified": True,
        "hidden_size": card.hidden_size,
        "context": card.max_position_embeddings,
        "drafter_bytes": each * len(config.drafters),
        "tokenizer_faults": faults,
        "tokenizer_notes": (*rendering.departs, *notes),
    }


def parameters(card: TargetCard, draft_vocab: int) -> int:
    """Parameters of an EAGLE-3 drafter for this target: fc, one layer with a doubled input, head."""
    hidden, query = card.hidden_size, card.num_attention_heads * card.head_dim
    key = card.num_key_value_heads * card.head_dim
    attention = 2 * hidden * (query + 2 * key) + query * hidden
    return 3 * hidden**2 + attention + 3 * hidden * card.intermediate_size + draft_vocab * hidden


def _export(run_dir: Path, name: str) -> Export:
    folder = run_dir / "export" / name / "sglang"
    weights, vocabulary = _gates(folder)
    serve = _json(run_dir / "serve" / f"{name}.json")
    benches = {path.stem: _json(path) for path in sorted((run_dir / "bench" / name).glob("*.json"))}
    coverage = _manifest_facts(run_dir / "merged" / "vocab.safetensors").get("coverage") or {}
    return Export(
        config=_json(folder / "config.json"),
        weights=weights,
        vocabulary=vocabulary,
        coverage=coverage.get("held_out") or coverage.get("train"),
        trained=_manifest_facts(run_dir / "drafters" / name / "model.safetensors").get("simulated_acceptance_length"),
        served=serve.get("acceptance_length"),
        reference=serve.get("reference_acceptance_length"),
        suites={suite: bench["acceptance_length"] for suite, bench in benches.items() if "acceptance_length" in bench},
        verdicts={
            suite: bench["verdict"]["sentence"] for suite, bench in benches.items()
            if not bench.get("verdict", {}).get("deploy", True)
        },
    )  # fmt: skip


def _gates(folder: Path) -> tuple[str, str]:
    """Faults of the tensors and of the token map, as the export's own gates word them."""
    from safetensors import SafetensorError, safe_open

    from eyrie.export.base import check_vocabulary
    from eyrie.export.sglang import gate

    path = folder / "model.safetensors"
    weights = vocabulary = ""
    try:
        with safe_open(path, "pt") as file:
            check_vocabulary(file.get_tensor("d2t"), file.get_tensor("t2d"), path)
    except EyrieError as error:
        vocabulary = str(error)
    except (OSError, SafetensorError) as error:
        vocabulary = f"{path}: its token map cannot be read ({error})"
    try:
        gate(folder)
    except EyrieError as error:
        weights = str(error)
    return ("" if weights == vocabulary else weights), vocabulary


def _pool(folder: Path) -> Pool:
    files = Files(folder)
    state = files.read_state()
    try:
        planned = files.read_spec().planned_pool_tokens
    except EyrieError:
        planned = None
    return Pool(server=folder.name, planned=planned, offered=state.pool_tokens if state else None)


def _manifest_facts(data: Path) -> dict[str, Any]:
    try:
        return read_manifest(data).facts
    except EyrieError:
        return {}


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []


def _output(path: Path, state: Path) -> str:
    """The output that a mark in ``.snakemake/incomplete`` stands for; the doctor's own page, in the making, is none."""
    text = "".join(part.removeprefix("@") for part in path.relative_to(state / "incomplete").parts)
    try:
        name = base64.b64decode(text, altchars=b"-_").decode()
    except (binascii.Error, UnicodeDecodeError):
        name = text
    return "" if Path(name).name in ("doctor.md", "doctor.json") else name
