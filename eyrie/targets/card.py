"""The target card: what a target model is, in numbers and hashes, measured once per run.

``results/<run>/target.json`` is read by every later stage; its three hashes go into the manifests of everything that
was made for this target, so that nothing made for another can be mixed in.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from eyrie.errors import EyrieError
from eyrie.formats.manifest import sha256_of
from eyrie.formats.publish import write_json
from eyrie.recipes import canonical_json
from eyrie.targets.selftest import Rendering, examine

WEIGHTS = (".safetensors", ".bin", ".pt")
# Files that decide how text becomes ids; which of them exist depends on the kind of tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py", "*.safetensors"]
WHOLE_HASH_BYTES = 4 * 10**9  # weights up to this size are hashed whole, larger ones by header and size


class TargetCard(BaseModel):
    """What later stages need to know of the target.

    Attributes:
        model: folder or hub id, as the config names it; ``revision`` that of a hub id.
        stop_ids: ids that end an answer: eos of config, generation config and tokenizer, and ends of turn. Ascending.
        special_ids: ids of special added tokens, those of ``stop_ids`` included. Ascending.
        target, tokenizer, template: sha256 of the weights with their config, the tokenizer's files, the chat template
            (with the arguments that it is always given, where there are any).
        rendering: what the start-up self-test found.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    revision: str | None = None
    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tied_embeddings: bool
    dtype: str
    stop_ids: list[int]
    special_ids: list[int]
    target: str
    tokenizer: str
    template: str
    rendering: Rendering = Rendering()

    def identity(self) -> dict[str, str]:
        """What a manifest records and a consumer compares."""
        return {"target": self.target, "tokenizer": self.tokenizer, "template": self.template}


def read_card(path: Path) -> TargetCard:
    """Raises :class:`EyrieError` when the file is missing or is no target card."""
    try:
        return TargetCard.model_validate_json(path.read_text())
    except FileNotFoundError:
        raise EyrieError(f"{path}: missing; rebuild it with `snakemake {path}`") from None
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"])) or "top level"
        raise EyrieError(
            f"{path}: no target card ({where}: {fault['msg']}); rebuild with `snakemake -f {path}`"
        ) from None


def default_layers(num_layers: int) -> tuple[int, int, int]:
    """Boundary ids that EAGLE-3 captures: the residual stream entering layers 2, N//2 and N-3.

    Raises:
        EyrieError: the model has too few layers for three different ids.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise EyrieError(
            f"a target of {num_layers} layers has no default boundary ids; set hidden.layers in the config"
        )
    return layers


def identify(recipe: dict[str, Any], model: str, out: Path) -> None:
    """Measure the target and write its card.

    Args:
        recipe: the ``target`` recipe (revision of a hub id, thinking, trust_remote_code).
        model: local Hugging Face folder, or a hub id.
        out: where the card goes.

    Raises:
        EyrieError: no such folder or hub id, a folder without config, weights, tokenizer or chat template, or a
            tokenizer that fails its self-test.
    """
    chosen = recipe["target"]
    folder = resolve(model, chosen.get("revision"))
    config = read_config(folder)
    weights = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    if not weights:
        raise EyrieError(
            f"{folder}: holds no weights (*.safetensors); finish the download or point target.model elsewhere"
        )
    words = _tokenizer_facts(folder, config, chosen)
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    card = TargetCard(
        model=model,
        revision=chosen.get("revision"),
        architecture=(config.get("architectures") or ["unknown"])[0],
        model_type=config.get("model_type", "unknown"),
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        max_position_embeddings=config["max_position_embeddings"],
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "unknown"),
        target=_weights_hash(folder, weights),
        tokenizer=_files_hash(_tokenizer_files(folder)),
        **words,
    )
    write_json(out, card.model_dump())


def resolve(model: str, revision: str | None = None) -> Path:
    """The local folder of a target: itself, or the snapshot of a hub id (downloaded once into the hub cache).

    Raises:
        EyrieError: no such folder; the hub cannot be reached, or does not have it.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise EyrieError(
            f"target.model: no folder {model}; give an existing Hugging Face folder or a hub id (owner/name)"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=HUB_FILES))
    except Exception as error:  # the hub library raises a dozen unrelated types when it is offline
        why = " ".join(str(error).split())[:160]
        raise EyrieError(
            f"target.model: {model} is no local folder and could not be fetched from the hub "
            f"({type(error).__name__}: {why}); fix the name, log in, or download it and give the folder"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """The language model's ``config.json`` (``text_config`` of a multi-modal one). Raises :class:`EyrieError`."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EyrieError(f"{folder}: holds no config.json; point target.model at a Hugging Face model folder") from None
    except ValueError as error:
        raise EyrieError(f"{path}: is no JSON ({error}); fetch the model again") from None
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config = {**config, **inner, "architectures": config.get("architectures")}
    needed = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size",
              "max_position_embeddings")  # fmt: skip
    for key in needed:
        if not isinstance(config.get(key), int):
            raise EyrieError(f"{path}: has no number {key!r}; only decoder-only language models can be targets")
    return config


def _tokenizer_facts(folder: Path, config: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
    """``stop_ids``, ``special_ids``, ``template`` and ``rendering`` of the card."""
    from eyrie.render.chat_template import templates_of
    from eyrie.render.renderer import Renderer

    if not _tokenizer_files(folder):
        raise EyrieError(
            f"{folder}: holds no tokenizer (tokenizer.json); copy the tokenizer's files beside the weights"
        )
    trusted = chosen.get("trust_remote_code", False)
    rendering = examine(folder, config, thinking=chosen.get("thinking"), trust_remote_code=trusted)
    renderer = Renderer(folder, rendering=rendering)
    tokenizer = renderer.tokenizer
    specials = {token.content: id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = {*specials.values(), *tokenizer.all_special_ids}
    stops = {*_ids(config.get("eos_token_id")), *_ids(tokenizer.eos_token_id)}
    generation = folder / "generation_config.json"
    if generation.exists():
        stops |= set(_ids(json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")))
    stops |= set(renderer.family_stops())
    stops -= {id for name, id in renderer.controls.ids_of.items() if name in renderer.family.message_ends}
    if not stops:
        raise EyrieError(f"{folder}: names no eos token; set eos_token_id in generation_config.json")
    template = "\0".join(dict.fromkeys(templates_of(tokenizer, folder)))
    if rendering.template_kwargs:
        template += "\0" + canonical_json(rendering.template_kwargs)
    return {
        "stop_ids": sorted(stops),
        "special_ids": sorted(ids | stops),
        "template": hashlib.sha256(template.encode()).hexdigest(),
        "rendering": rendering,
    }


def _ids(value: Any) -> list[int]:
    """``eos_token_id`` may be null, a number or a list of numbers."""
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _tokenizer_files(folder: Path) -> list[Path]:
    named = [folder / name for name in TOKENIZER_FILES]
    # what code that comes with the weights renders and encodes with; its models have nothing to do with that
    code = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith(("modeling_", "configuration_"))]
    found = [path for path in [*named, *code] if path.is_file()]
    return found if any(path.name in TOKENIZER_FILES[:-1] for path in found) else []


def _files_hash(paths: list[Path]) -> str:
    """One hash over names and bytes."""
    total = hashlib.sha256()
    for path in paths:
        total.update(f"{path.name}\0{sha256_of(path)}\n".encode())
    return total.hexdigest()


def _weights_hash(folder: Path, weights: list[Path]) -> str:
    """Hash of the weights and of the config that says how they compute.

    Up to 4 GB every byte counts; above that the safetensors headers (names, shapes, dtypes, offsets) and file sizes
    do, because reading a terabyte to start a run is no option.
    """
    configs = [path for name in ("config.json", "generation_config.json") if (path := folder / name).is_file()]
    if sum(path.stat().st_size for path in weights) <= WHOLE_HASH_BYTES:
        return _files_hash([*configs, *weights])
    total = hashlib.sha256(_files_hash(configs).encode())
    for path in weights:
        total.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                total.update(file.read(length))
    return total.hexdigest()
