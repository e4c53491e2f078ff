"""Hidden shards: what is written comes back, and what does not belong is refused."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyrie.errors import EyrieError
from eyrie.formats.hidden import HiddenLayout, HiddenShard, HiddenWriter

TARGET, TOKENS = "t" * 64, "k" * 64
H, LAYERS = 8, (2, 3, 5)


def layout(lengths: list[int], finals: list[int], dtype: str = "bfloat16") -> HiddenLayout:
    return HiddenLayout(lengths, finals, H, LAYERS, dtype, TARGET, TOKENS)


def rows_of(shape: HiddenLayout, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, shape.dtype)
    return [
        (torch.randn(t, 3 * H, generator=g).to(dtype), torch.randn(f, H, generator=g).to(dtype))
        for t, f in zip(shape.lengths, shape.finals, strict=True)
    ]


def write(path: Path, shape: HiddenLayout, order: list[int] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows = rows_of(shape)
    with HiddenWriter(path, shape) as writer:
        for row in order or range(len(rows)):
            writer.write(row, *rows[row])
    return rows


def reopen(path: Path) -> HiddenShard:
    return HiddenShard.open(path, target_sha=TARGET, tokens_sha=TOKENS)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dtype=st.sampled_from(["bfloat16", "float32"]))
def test_rows_written_in_any_order_come_back(tmp_path: Path, data: st.DataObject, dtype: str) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=7))
    finals = [data.draw(st.integers(0, length - 1)) for length in lengths]
    order = data.draw(st.permutations(range(len(lengths))))
    shape = layout(lengths, finals, dtype)
    rows = write(tmp_path / "h.safetensors", shape, list(order))
    shard = reopen(tmp_path / "h.safetensors")
    assert (len(shard), shard.tokens, shard.hidden_size, shard.layers) == (len(lengths), sum(lengths), H, LAYERS)
    assert shard.dtype == getattr(torch, dtype)
    for index, (aux, final) in enumerate(rows):
        got_aux, got_final = shard.row(index)
        assert torch.equal(got_aux, aux)
        assert torch.equal(got_final, final)


def test_the_bytes_depend_on_the_rows_alone(tmp_path: Path) -> None:
    shape = layout([3, 1, 4], [2, 0, 3])
    write(tmp_path / "a", shape)
    write(tmp_path / "b", shape, [2, 0, 1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_other_tools_can_read_it(tmp_path: Path) -> None:
    rows = write(tmp_path / "h", layout([3, 2], [1, 1]))
    tensors = load_file(tmp_path / "h")
    assert torch.equal(tensors["aux"], torch.cat([aux for aux, _ in rows]))
    assert torch.equal(tensors["final"], torch.cat([final for _, final in rows]))
    assert tensors["row_offsets"].tolist() == [0, 3, 5]
    assert tensors["final_offsets"].tolist() == [0, 1, 2]
    with safe_open(tmp_path / "h", framework="pt") as file:
        assert file.metadata() == {
            "format": "eyrie-hidden-2", "layers": "[2, 3, 5]", "dtype": "bfloat16", "target": TARGET, "tokens": TOKENS,
            "finals": "answers",
        }  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"target_sha": "x"}, "another target"),
        ({"tokens_sha": "x"}, "other token rows"),
        ({"layers": (1, 2, 3)}, "other layers"),
    ],
)
def test_what_does_not_belong_is_refused(tmp_path: Path, wrong: dict[str, str], why: str) -> None:
    path = tmp_path / "h.safetensors"
    write(path, layout([2], [1]))
    known = {"target_sha": TARGET, "tokens_sha": TOKENS, "layers": LAYERS}
    assert len(HiddenShard.open(path, **known)) == 1
    with pytest.raises(EyrieError, match=rf"{path}: was captured from {why} .*snakemake -f {path}"):
        HiddenShard.open(path, **{**known, **wrong})


@pytest.mark.parametrize("left", [0, 5, 40, 300, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, left: int) -> None:
    path = tmp_path / "h"
    write(path, layout([2, 5], [1, 2]))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(EyrieError, match="truncated or no safetensors file"):
        reopen(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match=r"h: missing; capture it again with `snakemake -f"):
        reopen(tmp_path / "h")


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"aux": torch.zeros(2, 2)}, tmp_path / "h")
    with pytest.raises(EyrieError, match="is no hidden shard"):
        reopen(tmp_path / "h")


@pytest.mark.parametrize(
    ("name", "value"), [("row_offsets", [0, 3, 2]), ("row_offsets", [0, 2, 4]), ("final_offsets", [0, 1])]
)
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, name: str, value: list[int]) -> None:
    shape = layout([2, 1], [1, 0])
    write(tmp_path / "h", shape)
    tensors = {**load_file(tmp_path / "h"), name: torch.tensor(value)}
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, tmp_path / "h", metadata=shape.metadata())
    with pytest.raises(EyrieError, match="row offsets do not fit"):
        reopen(tmp_path / "h")


def test_a_row_that_is_missing_twice_or_misshapen_is_a_bug(tmp_path: Path) -> None:
    shape = layout([2, 1], [1, 0])
    rows = rows_of(shape)
    writer = HiddenWriter(tmp_path / "h", shape).__enter__()
    writer.write(0, *rows[0])
    with pytest.raises(RuntimeError, match="written twice"):
        writer.write(0, *rows[0])
    with pytest.raises(RuntimeError, match="shapes"):
        writer.write(1, *rows[0])
    with pytest.raises(RuntimeError, match="expected bfloat16"):
        writer.write(1, rows[1][0].float(), rows[1][1].float())
    with pytest.raises(RuntimeError, match="1 rows were never written, the first is 1"):
        writer.__exit__(None, None, None)


def test_a_row_number_out_of_range_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "h", layout([2], [1]))
    for index in (-1, 1):
        with pytest.raises(IndexError):
            reopen(tmp_path / "h").row(index)


def test_a_full_disk_is_found_before_the_first_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left") as caught, HiddenWriter(tmp_path / "h", layout([2], [1])):
        pytest.fail("the body must not run")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "h"))
