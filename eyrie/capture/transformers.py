"""Capture with the transformers library: hooks on decoder layers, no head and no stack of all layers' states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eyrie.capture.base import States
from eyrie.errors import EyrieError

HEAD_CHUNK = 256
"""Positions whose logits exist at a time."""


class TransformersCapturer:
    """A Hugging Face causal language model that hands out its states.

    Rows are padded on the right and run without an attention mask: attention is causal, so a token never sees what
    stands behind it, and the library can take its fast path. Padding is cut off before anything leaves.

    Args:
        folder: Hugging Face folder of the target.
        layers: boundary ids to capture, ascending.
        storage_dtype: dtype of the states handed out.
        compute_dtype: dtype of weights and arithmetic.
        device: torch device.
        trust_remote_code: run model code that lies in the folder.

    Raises:
        EyrieError: the folder cannot be loaded, the model is no stack of decoder layers, or it lacks a layer.
    """

    def __init__(
        self, folder: Path, layers: tuple[int, ...], storage_dtype: torch.dtype, compute_dtype: torch.dtype,
        device: str, *, trust_remote_code: bool = False,
    ) -> None:  # fmt: skip
        self.layers, self.storage_dtype, self.device = layers, storage_dtype, device
        model = load_model(folder, compute_dtype, trust_remote_code=trust_remote_code).to(device)
        self.decoder, self.head = find_decoder(model, folder), model.get_output_embeddings()
        blocks = self.decoder.layers
        if not 0 <= layers[0] <= layers[-1] < len(blocks):
            raise EyrieError(
                f"hidden.layers: {list(layers)} are no boundary ids of {folder}, which has layers 0 to "
                f"{len(blocks) - 1}; choose ids among these"
            )
        self._entering: dict[int, Tensor] = {}
        for layer in layers:
            blocks[layer].register_forward_pre_hook(self._keeper(layer), with_kwargs=True)

    @torch.inference_mode()
    def states(self, ids_batch: Sequence[Sequence[int]]) -> Iterator[States]:
        """See :meth:`eyrie.capture.base.Capturer.states`."""
        ids_BT = torch.zeros(len(ids_batch), max(map(len, ids_batch)), dtype=torch.int64)
        for b, ids in enumerate(ids_batch):
            ids_BT[b, : len(ids)] = torch.tensor(ids)
        last_BTH = self.decoder(input_ids=ids_BT.to(self.device), use_cache=False).last_hidden_state
        final_BTH = last_BTH.to("cpu", self.storage_dtype)
        aux_BTA = torch.cat([self._entering.pop(layer) for layer in self.layers], dim=-1).cpu()
        return iter([(aux_BTA[b, : len(ids)], final_BTH[b, : len(ids)]) for b, ids in enumerate(ids_batch)])

    @torch.inference_mode()
    def alone(self, ids: Sequence[int]) -> States:
        """The library's own list of hidden states of one unpadded row."""
        ids_1T = torch.tensor([list(ids)], device=self.device)
        out = self.decoder(input_ids=ids_1T, use_cache=False, output_hidden_states=True)
        self._entering.clear()
        aux_TA = torch.cat([out.hidden_states[layer][0] for layer in self.layers], dim=-1)
        return aux_TA.cpu(), out.hidden_states[-1][0].cpu()

    @torch.inference_mode()
    def best_tokens(self, final_NH: Tensor) -> Tensor:
        """See :meth:`eyrie.capture.base.Capturer.best_tokens`."""
        weight: Tensor = self.head.weight
        parts = [self.head(part.to(weight)).argmax(-1).cpu() for part in final_NH.split(HEAD_CHUNK)]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    def _keeper(self, layer: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            entering = args[0] if args else kwargs["hidden_states"]
            # a copy: a layer may add to its input in place
            self._entering[layer] = entering.to(self.storage_dtype, copy=True)

        return keep


def load_model(folder: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> Any:
    """The causal language model of ``folder`` in evaluation mode, on the CPU. Raises :class:`EyrieError`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise EyrieError(f"{folder}: cannot be loaded as a causal language model ({why}); fetch it again") from error
    return model.eval().requires_grad_(False)


def find_decoder(model: Any, folder: Path) -> Any:
    """The stack of decoder layers inside ``model``: ``model.model``, or the language part of a nested one."""
    outer = getattr(model, "model", None)
    inner = [getattr(outer, name, None) for name in ("language_model", "text_model", "decoder")]
    for candidate in (outer, *inner):
        if isinstance(getattr(candidate, "layers", None), nn.ModuleList):
            return candidate
    raise EyrieError(
        f"{folder}: {type(model).__name__} keeps no decoder layers at model.layers, so its states cannot be captured; "
        "choose a decoder-only target"
    )
