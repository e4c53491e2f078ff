"""What every engine's layout consists of, and the gates that all layouts share.

Engines are forgiving where it hurts: they drop keys they do not know, leave absent ones uninitialised, and a wrong
token map or layer id costs acceptance, not an error. So every name, shape, dtype and value is checked here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from eyrie.drafters.eagle3 import Eagle3
from eyrie.errors import EyrieError
from eyrie.llama.weights import rotary, rotate_halves
from eyrie.targets.card import TargetCard

AGAIN = "export it again with `snakemake -R export`"


class Layout(Protocol):
    """How one engine wants a drafter: a module of this package, registered in :mod:`eyrie.export.stage`."""

    def to_tensors(self, drafter: Eagle3) -> dict[str, Tensor]:
        """Tensors of ``model.safetensors`` by the engine's names."""
        ...

    def to_config(self, drafter: Eagle3, card: TargetCard) -> dict[str, Any]:
        """The engine's ``config.json``."""
        ...

    def read_back(self, folder: Path) -> Eagle3:
        """Gate the folder and load it by the engine's own rules; raises :class:`EyrieError`."""
        ...


@dataclass(frozen=True)
class TensorSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype


def check_tensors(tensors: Mapping[str, Tensor], specs: Mapping[str, TensorSpec], where: Path) -> None:
    """Exactly these names, shapes and dtypes, and no NaN or infinity. Raises :class:`EyrieError` with the name."""
    for name in specs:
        if name not in tensors:
            raise EyrieError(f"{where}: lacks the tensor {name!r}{_near(name, tensors, specs)}; {AGAIN}")
    for name in tensors:
        if name not in specs:
            raise EyrieError(f"{where}: holds {name!r}, which the engine would drop silently; {AGAIN}")
    for name, spec in specs.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != spec.shape:
            raise EyrieError(f"{where}: {name!r} has shape {list(tensor.shape)}, expected {list(spec.shape)}; {AGAIN}")
        if tensor.dtype != spec.dtype:
            raise EyrieError(f"{where}: {name!r} is {tensor.dtype}, expected {spec.dtype}; {AGAIN}")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise EyrieError(f"{where}: {name!r} holds NaN or infinity; train the drafter again")


def check_vocabulary(d2t: Tensor, t2d: Tensor, where: Path) -> None:
    """``d2t`` holds offsets (target id minus draft id) and names exactly the tokens that ``t2d`` marks.

    Args:
        d2t: int64 ``[Dv]``.
        t2d: bool ``[V]``.

    Raises:
        EyrieError: ids that do not ascend, lie outside the vocabulary, or disagree with ``t2d``; a file that holds
            absolute ids instead of offsets is one of these.
    """
    ids = d2t + torch.arange(len(d2t))
    if len(ids) and (int(ids[0]) < 0 or int(ids[-1]) >= len(t2d) or bool((ids.diff() <= 0).any())):
        raise EyrieError(
            f"{where}: 'd2t' is no map of offsets into {len(t2d)} target tokens (draft id + d2t must ascend and stay "
            f"below); absolute ids do not belong there; {AGAIN}"
        )
    if not torch.equal(ids, t2d.nonzero()[:, 0]):
        raise EyrieError(f"{where}: 'd2t' and 't2d' name different tokens; {AGAIN}")


def check_config(config: Mapping[str, Any], expected: Mapping[str, Any], where: Path, prefix: str = "") -> None:
    """Exactly these keys and values, nested ones too. Raises :class:`EyrieError` with the dotted key."""
    for key in [*expected, *(key for key in config if key not in expected)]:
        dotted = f"{prefix}{key}"
        if key not in config:
            raise EyrieError(f"{where}: lacks {dotted!r}{_near(key, config, expected)}; {AGAIN}")
        if key not in expected:
            raise EyrieError(f"{where}: holds {dotted!r}, which is not in the engine's table; {AGAIN}")
        have, want = config[key], expected[key]
        if isinstance(want, Mapping) and isinstance(have, Mapping):
            check_config(have, want, where, f"{dotted}.")
        elif type(have) is not type(want) or have != want:
            raise EyrieError(f"{where}: {dotted!r} is {have!r}, expected {want!r}; {AGAIN}")


@torch.no_grad()
def first_step_logits(drafter: Eagle3, embedding_TH: Tensor, aux_TA: Tensor) -> Tensor:
    """Draft logits ``[T, Dv]`` of a first draft step over one sequence, in float32.

    Args:
        embedding_TH: embeddings of tokens 1 to T.
        aux_TA: auxiliary hidden states (A = 3H) at columns 0 to T - 1.
    """
    c, attention = drafter.config, drafter.midlayer.self_attn
    T, D = len(embedding_TH), c.head_dim
    cos_TD, sin_TD = rotary(T, D, c.rope_theta)

    def heads(x_TN: Tensor) -> Tensor:
        return x_TN.view(T, -1, D).transpose(0, 1)

    feature_TH = drafter.fc(aux_TA)
    wide_T2H = drafter.attention_input(embedding_TH, feature_TH)
    query = rotate_halves(heads(attention.q_proj(wide_T2H)), cos_TD, sin_TD)
    key = rotate_halves(heads(attention.k_proj(wide_T2H)), cos_TD, sin_TD)
    value = heads(attention.v_proj(wide_T2H))
    mixed_NTD = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True, enable_gqa=True)[0]
    return drafter.logits(drafter.finish(feature_TH, mixed_NTD.transpose(0, 1).reshape(T, -1)))


def check_same_drafter(trained: Eagle3, served: Eagle3, where: Path) -> None:
    """What the engine would run equals what was trained: logits on a fixed random input, token map, layers, shape.

    Raises:
        EyrieError: naming what differs.
    """
    c = trained.config
    if served.config != c:
        names = [name for name in type(c).model_fields if getattr(served.config, name) != getattr(c, name)]
        faults = ", ".join(f"{n} {getattr(served.config, n)!r} instead of {getattr(c, n)!r}" for n in names)
        raise EyrieError(f"{where}: the engine would run another drafter ({faults}); {AGAIN}")
    if not torch.equal(served.target_ids(), trained.target_ids()):
        raise EyrieError(f"{where}: the engine would map draft tokens to other target tokens; {AGAIN}")
    generator = torch.Generator().manual_seed(0)
    embedding_TH = torch.randn(16, c.hidden_size, generator=generator)
    aux_TA = torch.randn(16, 3 * c.hidden_size, generator=generator)
    want, have = (first_step_logits(drafter, embedding_TH, aux_TA) for drafter in (trained, served))
    if not torch.equal(want, have):
        worst = float((want - have).abs().max())
        raise EyrieError(f"{where}: the engine's logits differ from the trainer's by up to {worst:.3g}; {AGAIN}")


def _near(name: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """A left-over name that looks like the missing one."""
    near = difflib.get_close_matches(name, [other for other in found if other not in expected], n=1, cutoff=0.6)
    return f" (it holds {near[0]!r} instead)" if near else ""
