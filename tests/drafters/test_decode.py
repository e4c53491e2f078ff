"""The serving code of the drafter against its torch module, computed the slow way."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyrie.drafters import load_drafter, save_drafter
from eyrie.drafters.decode import Eagle3Decoder
from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random, start_from_target
from eyrie.errors import EyrieError
from eyrie.llama.weights import LlamaWeights, rotary
from eyrie.targets.ends import read_ends

H, V, DV, HEADS, D = 24, 50, 31, 4, 8


def make_drafter(kv_heads: int = 2, seed: int = 0) -> Eagle3:
    """Random weights that bfloat16 holds exactly, so that storage rounds nothing."""
    config = Eagle3Config(
        hidden_size=H, intermediate_size=40, num_attention_heads=HEADS, num_key_value_heads=kv_heads, head_dim=D,
        rms_norm_eps=1e-5, rope_theta=10_000.0, max_position_embeddings=64, vocab_size=V, draft_vocab_size=DV,
        layers=(2, 3, 4), ttt_steps=3, target_sha="x",
    )  # fmt: skip
    drafter = Eagle3(config)
    g = torch.Generator().manual_seed(seed)
    start_at_random(drafter, g)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=g) * 0.3)
            parameter.copy_(parameter.bfloat16())
    kept = torch.randperm(V, generator=g)[:DV].sort().values
    drafter.d2t.copy_(kept - torch.arange(DV))
    drafter.t2d[kept] = True
    return drafter


def rope(x_TND: Tensor, positions: Tensor) -> Tensor:
    cos, sin = rotary(64, D, 10_000.0)
    cos_T1D, sin_T1D = cos[positions][:, None], sin[positions][:, None]
    a, b = x_TND.chunk(2, -1)
    return torch.cat([a * cos_T1D - b * sin_T1D, b * cos_T1D + a * sin_T1D], -1)


def slow_forward(drafter: Eagle3, embedding_TH: Tensor, feature_TH: Tensor) -> Tensor:
    """All columns at once: plain causal attention with a Python loop over heads."""
    attention, T = drafter.midlayer.self_attn, len(embedding_TH)
    wide = drafter.attention_input(embedding_TH, feature_TH)
    positions = torch.arange(T)
    query = rope(attention.q_proj(wide).view(T, HEADS, D), positions)
    key = rope(attention.k_proj(wide).view(T, -1, D), positions)
    value = attention.v_proj(wide).view(T, -1, D)
    group = HEADS // key.shape[1]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    mixed = []
    for head in range(HEADS):
        scores = (query[:, head] @ key[:, head // group].t() / math.sqrt(D)).masked_fill(future, float("-inf"))
        mixed.append(scores.softmax(-1) @ value[:, head // group])
    return drafter.finish(feature_TH, torch.cat(mixed, -1))


def inputs(columns: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(columns, H, generator=g), torch.randn(columns, H, generator=g)


def test_fuse_is_fc_of_low_middle_high() -> None:
    drafter = make_drafter()
    aux = torch.randn(5, 3, H, generator=torch.Generator().manual_seed(2))
    found = Eagle3Decoder(drafter, 8).fuse(aux.numpy())
    with torch.no_grad():
        expected = drafter.fc(torch.cat([aux[:, 0], aux[:, 1], aux[:, 2]], -1))
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("chunks", [[13], [1] * 13, [5, 1, 4, 3], [9, 2, 2]])
def test_forward_equals_the_module(kv_heads: int, chunks: list[int]) -> None:
    drafter = make_drafter(kv_heads)
    embedding, feature = inputs(13)
    decoder, start, outputs = Eagle3Decoder(drafter, 16), 0, []
    for size in chunks:
        part = slice(start, start + size)
        outputs.append(decoder.forward(embedding[part].numpy(), feature[part].numpy(), start))
        start += size
    with torch.no_grad():
        expected = slow_forward(drafter, embedding, feature)
    np.testing.assert_allclose(np.concatenate(outputs), expected.numpy(), atol=5e-5, rtol=1e-4)


def test_a_chain_feeds_the_output_back_and_is_overwritten_by_true_columns() -> None:
    """Chain columns stand after the true ones; the next true columns take their place."""
    drafter = make_drafter()
    decoder = Eagle3Decoder(drafter, 16)
    embedding, feature = inputs(10)
    true = decoder.forward(embedding[:6].numpy(), feature[:6].numpy(), 0)
    chain = [torch.from_numpy(true[-1:])]
    for step in range(3):
        out = decoder.forward(embedding[6 + step : 7 + step].numpy(), chain[-1].numpy(), 6 + step)
        chain.append(torch.from_numpy(out))
    with torch.no_grad():
        for step in range(3):
            features = torch.cat([feature[:6], *chain[: step + 1]])
            expected = slow_forward(drafter, embedding[: 7 + step], features)[-1:]
            np.testing.assert_allclose(chain[step + 1].numpy(), expected.numpy(), atol=5e-5, rtol=1e-4)
        after = decoder.forward(embedding[6:].numpy(), feature[6:].numpy(), 6)
        np.testing.assert_allclose(after, slow_forward(drafter, embedding, feature)[6:].numpy(), atol=5e-5, rtol=1e-4)


def test_more_columns_than_the_cache_holds_are_refused() -> None:
    embedding, feature = (x.numpy() for x in inputs(5))
    decoder = Eagle3Decoder(make_drafter(), 8)
    decoder.forward(embedding, feature, 3)
    with pytest.raises(ValueError, match="8 columns"):
        decoder.forward(embedding, feature, 4)


def test_best_is_the_target_id_of_the_largest_logit() -> None:
    drafter = make_drafter()
    decoder = Eagle3Decoder(drafter, 8)
    outputs, _ = inputs(40, seed=3)
    with torch.no_grad():
        expected = drafter.target_ids()[drafter.logits(outputs).argmax(-1)].tolist()
    found = [decoder.best(outputs[i : i + 1].numpy()) for i in range(len(outputs))]
    assert found == expected
    assert len(set(found)) > 5
    assert all(drafter.t2d[token] for token in found)


def test_weights_are_rounded_to_bfloat16_once() -> None:
    """A float32 master decodes as its export will."""
    drafter, rounded = make_drafter(), make_drafter()
    with torch.no_grad():
        for a, b in zip(drafter.parameters(), rounded.parameters(), strict=True):
            a.mul_(1.001)
            b.copy_(a.bfloat16())
    embedding, feature = (x.numpy() for x in inputs(4))
    found = Eagle3Decoder(drafter, 8).forward(embedding, feature, 0)
    assert np.array_equal(found, Eagle3Decoder(rounded, 8).forward(embedding, feature, 0))


def test_save_and_load_round_trip(tmp_path: Path) -> None:
    drafter = make_drafter()
    save_drafter(drafter, tmp_path)
    loaded, config = load_drafter(tmp_path)
    assert config == drafter.config
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    dtypes = {t.dtype for t in load_file(tmp_path / "model.safetensors").values()}
    assert dtypes == {torch.bfloat16, torch.int64, torch.bool}


def fault(folder: Path) -> str:
    with pytest.raises(EyrieError) as caught:
        load_drafter(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_misfits_are_one_line(tmp_path: Path) -> None:
    assert "config.json" in fault(tmp_path)
    save_drafter(make_drafter(), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    state, text = load_file(weights), config.read_text()

    save_file({name: t for name, t in state.items() if name != "fc.weight"}, weights)
    assert "fc.weight" in fault(tmp_path)
    save_file({**state, "extra.weight": torch.ones(2)}, weights)
    assert "extra.weight" in fault(tmp_path)
    save_file({**state, "norm.weight": torch.ones(H + 1)}, weights)
    assert "norm.weight" in fault(tmp_path)
    save_file(state, weights)
    config.write_text(json.dumps({**json.loads(text), "surprise": 1}))
    assert "surprise" in fault(tmp_path)
    config.write_text("{")
    assert "config.json" in fault(tmp_path)
    config.write_text(text)
    weights.write_bytes(b"no safetensors")
    assert "model.safetensors" in fault(tmp_path)
    weights.unlink()
    assert "model.safetensors" in fault(tmp_path)


def test_start_from_target_is_the_target_s_last_layer(tiny_target: Path) -> None:
    """With its embedding half silent, the new drafter does what the target's last layer does to its input."""
    weights = LlamaWeights.load(tiny_target)
    t = weights.config
    config = Eagle3Config(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        rms_norm_eps=t.rms_norm_eps, rope_theta=t.rope_theta, max_position_embeddings=1024, vocab_size=600,
        draft_vocab_size=600, layers=(1, 3, 5), ttt_steps=1, target_sha="x",
    )  # fmt: skip
    drafter = Eagle3(config)
    start_from_target(drafter, read_ends(tiny_target, t.num_layers), torch.Generator().manual_seed(0))
    with torch.no_grad():
        for linear in (drafter.midlayer.self_attn.q_proj, drafter.midlayer.self_attn.k_proj):
            linear.weight[:, :64] = 0
        drafter.midlayer.self_attn.v_proj.weight[:, :64] = 0

    from eyrie.llama.sequence import SequenceDecoder

    ids = torch.randint(3, 600, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    target = SequenceDecoder(weights, config.layers, capacity=16)
    logits, aux = target.extend(ids)
    decoder = Eagle3Decoder(drafter, 16)
    output = decoder.forward(target.embed(ids), decoder.fuse(aux), 0)
    with torch.no_grad():
        found = drafter.logits(torch.from_numpy(output)).numpy()
    np.testing.assert_allclose(found, logits, atol=1e-3, rtol=1e-3)
