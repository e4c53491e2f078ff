"""What ``auto`` means on which machine."""

from __future__ import annotations

import pytest
import torch

from eyrie.machine import choose_dtype


@pytest.mark.parametrize(
    ("units", "device", "few_rows", "many_rows"),
    [
        ({}, "cpu", "float32", "float32"),
        ({"avx512_bf16": False, "amx_bf16": False}, "cpu", "float32", "float32"),
        ({"avx512_bf16": True, "amx_bf16": False}, "cpu", "float32", "bfloat16"),
        ({"avx512_bf16": True, "amx_bf16": True}, "cpu", "bfloat16", "bfloat16"),
        ({}, "cuda:1", "bfloat16", "bfloat16"),
    ],
)
def test_auto_goes_by_the_machines_units(
    monkeypatch: pytest.MonkeyPatch, units: dict[str, bool], device: str, few_rows: str, many_rows: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units)
    assert choose_dtype("auto", device) == getattr(torch, few_rows)
    assert choose_dtype("auto", device, many_rows=True) == getattr(torch, many_rows)


def test_a_named_dtype_is_taken_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True, "avx512_bf16": True})
    assert choose_dtype("float32", "cuda", many_rows=True) == torch.float32
    assert choose_dtype("bfloat16", "cpu") == torch.bfloat16
