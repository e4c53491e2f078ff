"""Export to SGLang: what is written is what was trained, and every fault that the engine would swallow is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from eyrie.drafters import load_drafter, save_drafter
from eyrie.drafters.eagle3 import Eagle3, Eagle3Config, start_at_random
from eyrie.errors import EyrieError
from eyrie.export import export
from eyrie.export.base import check_same_drafter, check_vocabulary, first_step_logits
from eyrie.export.sglang import captured_layers, engine_layer_ids, load_as_engine, read_back
from eyrie.formats.manifest import RowCounts, manifest_path, read_manifest, sha256_of
from eyrie.formats.publish import publish
from eyrie.llama.weights import rotary
from eyrie.targets.card import TargetCard
from eyrie.train.data import Row, collate
from eyrie.train.loss import Teacher, ttt_loss

H, V, DV = 32, 90, 24
TARGET = "a" * 64
Tensors = dict[str, torch.Tensor]


def card_of(**changed: Any) -> TargetCard:
    known: dict[str, Any] = {
        "model": "tiny", "architecture": "LlamaForCausalLM", "model_type": "llama", "num_layers": 8, "hidden_size": H,
        "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": V,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 512, "tied_embeddings": True,
        "dtype": "bfloat16", "stop_ids": [2], "special_ids": [1, 2], "target": TARGET, "tokenizer": "b" * 64,
        "template": "c" * 64,
    }  # fmt: skip
    return TargetCard(**{**known, **changed})


def make_drafter(**changed: Any) -> Eagle3:
    known: dict[str, Any] = {
        "hidden_size": H, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 10_000.0, "max_position_embeddings": 512, "vocab_size": V,
        "draft_vocab_size": DV, "layers": (2, 4, 5), "ttt_steps": 3, "target_sha": TARGET,
    }  # fmt: skip
    drafter = Eagle3(Eagle3Config(**{**known, **changed}))
    generator = torch.Generator().manual_seed(0)
    start_at_random(drafter, generator)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_((parameter + torch.randn(parameter.shape, generator=generator) * 0.1).bfloat16())
    kept = torch.randperm(V, generator=generator)[:DV].sort().values
    drafter.d2t.copy_(kept - torch.arange(DV))
    drafter.t2d[kept] = True
    return drafter


def publish_drafter(folder: Path, drafter: Eagle3, card: TargetCard) -> Path:
    save_drafter(drafter, folder / "made")
    (folder / "made" / "config.json").replace(folder / "config.json")
    with publish(folder / "model.safetensors", stage="train", recipe={}, identity=card.identity()) as draft:
        (folder / "made" / "model.safetensors").replace(draft.path)
        draft.rows = RowCounts(read=1, kept=1)
    (folder / "made").rmdir()
    return folder


def run(folder: Path, drafter: Eagle3 | None = None, card: TargetCard | None = None, engine: str = "sglang") -> Path:
    card = card or card_of()
    target = folder / "target.json"
    target.write_text(card.model_dump_json())
    source = publish_drafter(folder / "drafters" / "eagle3", drafter or make_drafter(), card_of())
    export({"revision": 1}, drafter=source, target=target, out=folder / "export" / engine)
    return folder / "export" / engine


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    return run(tmp_path)


def test_what_the_engine_runs_is_what_was_trained(exported: Path, tmp_path: Path) -> None:
    trained, config = load_drafter(tmp_path / "drafters" / "eagle3")
    served = read_back(exported)
    assert served.config == config
    for name, tensor in trained.state_dict().items():
        assert torch.equal(served.state_dict()[name], tensor), name
    check_same_drafter(trained, served, exported)


def test_the_folder_holds_two_files_and_a_manifest(exported: Path, tmp_path: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {
        "config.json", "model.safetensors", "model.safetensors.manifest.json"
    }  # fmt: skip
    manifest = read_manifest(exported / "model.safetensors")
    source = tmp_path / "drafters" / "eagle3" / "model.safetensors"
    assert manifest.stage == "export"
    assert manifest.identity == card_of().identity()
    assert manifest.inputs == {"eagle3/model.safetensors": sha256_of(source)}
    assert manifest.facts["config_sha256"] == sha256_of(exported / "config.json")
    assert manifest.facts["layers"] == [2, 4, 5]


def test_names_shapes_and_dtypes(exported: Path) -> None:
    tensors = load_file(exported / "model.safetensors")
    assert {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()} == {
        "fc.weight": ("bfloat16", [H, 3 * H]),
        "midlayer.hidden_norm.weight": ("bfloat16", [H]),
        "midlayer.input_layernorm.weight": ("bfloat16", [H]),
        "midlayer.post_attention_layernorm.weight": ("bfloat16", [H]),
        "midlayer.self_attn.q_proj.weight": ("bfloat16", [32, 2 * H]),
        "midlayer.self_attn.k_proj.weight": ("bfloat16", [16, 2 * H]),
        "midlayer.self_attn.v_proj.weight": ("bfloat16", [16, 2 * H]),
        "midlayer.self_attn.o_proj.weight": ("bfloat16", [H, 32]),
        "midlayer.mlp.gate_proj.weight": ("bfloat16", [48, H]),
        "midlayer.mlp.up_proj.weight": ("bfloat16", [48, H]),
        "midlayer.mlp.down_proj.weight": ("bfloat16", [H, 48]),
        "norm.weight": ("bfloat16", [H]),
        "lm_head.weight": ("bfloat16", [DV, H]),
        "d2t": ("int64", [DV]),
        "t2d": ("bool", [V]),
    }


def test_the_config_is_read_by_transformers_as_meant(exported: Path) -> None:
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(exported)
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert (config.max_position_embeddings, config.draft_vocab_size, config.vocab_size) == (512, DV, V)
    assert config.tie_word_embeddings is False
    assert config.eagle_config == {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert config.eyrie["layers"] == [2, 4, 5]


def test_the_probe_is_the_trainer_s_first_step() -> None:
    drafter = make_drafter()
    g = torch.Generator().manual_seed(1)
    embed_VH, head_VH = torch.randn(V, H, generator=g), torch.randn(V, H, generator=g)
    ids_T, aux_TA = torch.randint(V, (12,), generator=g), torch.randn(12, 3 * H, generator=g)
    row = Row(ids_T, ((4, 12),), aux_TA, torch.randn(8, H, generator=g), 1.0, True)
    teacher = Teacher(head_VH[drafter.target_ids()], drafter.target_ids(), V)
    loss, _ = ttt_loss(drafter, collate([row]), embed_VH, teacher, *rotary(16, 8, 10_000.0), 1, 1.0)
    logits = first_step_logits(drafter, embed_VH[ids_T[1:]], aux_TA[:-1])[3:-1]
    wanted = teacher.probabilities(row.final_FH[1:])
    valid = teacher.draft_id_V[ids_T[5:]] >= 0
    by_hand = -(wanted * F.log_softmax(logits, -1)).sum(-1)[valid].mean()
    assert valid.any()
    torch.testing.assert_close(loss.detach(), by_hand, rtol=1e-5, atol=1e-5)


def edit_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


TENSOR_FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "misspelt key": (
        lambda t: t.update({"midlayer.hiden_norm.weight": t.pop("midlayer.hidden_norm.weight")}),
        r"lacks the tensor 'midlayer.hidden_norm.weight' \(it holds 'midlayer.hiden_norm.weight' instead\)",
    ),
    "missing key": (lambda t: t.pop("norm.weight"), "lacks the tensor 'norm.weight'"),
    "left-over key": (
        lambda t: t.update({"fc.bias": torch.zeros(H, dtype=torch.bfloat16)}),
        "holds 'fc.bias', which the engine would drop silently",
    ),
    "absolute d2t": (lambda t: t["d2t"].add_(torch.arange(DV)), "'d2t' is no map of offsets"),
    "d2t of other tokens": (lambda t: t["d2t"].zero_(), "'d2t' and 't2d' name different tokens"),
    "d2t that does not ascend": (lambda t: t["d2t"][1].sub_(5), "'d2t' is no map of offsets"),
    "t2d of other tokens": (lambda t: t["t2d"].logical_not_(), "'d2t' and 't2d' name different tokens"),
    "NaN": (lambda t: t["fc.weight"][0, 0].fill_(float("nan")), "'fc.weight' holds NaN or infinity"),
    "infinity": (lambda t: t["lm_head.weight"][3, 1].fill_(float("inf")), "'lm_head.weight' holds NaN or infinity"),
    "wrong shape": (
        lambda t: t.update({"midlayer.self_attn.k_proj.weight": t["midlayer.self_attn.k_proj.weight"][:, :H].clone()}),
        r"k_proj.weight' has shape \[16, 32\], expected \[16, 64\]",
    ),
    "wrong dtype": (lambda t: t.update({"fc.weight": t["fc.weight"].float()}), "'fc.weight' is torch.float32"),
    "d2t as int32": (lambda t: t.update({"d2t": t["d2t"].int()}), "'d2t' is torch.int32, expected torch.int64"),
}


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_a_fault_in_the_tensors_is_refused(exported: Path, fault: str) -> None:
    change, why = TENSOR_FAULTS[fault]
    edit_tensors(exported, change)
    with pytest.raises(EyrieError, match=why):
        read_back(exported)


CONFIG_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "layers off by one": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 4, 5]),
        r"'eagle_config.eagle_aux_hidden_state_layer_ids' is \[2, 4, 5\], expected \[1, 3, 4\]",
    ),
    "vLLM's layers off by one": (
        lambda c: c.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]),
        r"'eagle_aux_hidden_state_layer_ids' is \[1, 3, 4\], expected \[2, 4, 5\]",
    ),
    "no layers": (
        lambda c: c["eagle_config"].pop("eagle_aux_hidden_state_layer_ids"),
        "lacks 'eagle_config.eagle_aux_hidden_state_layer_ids'",
    ),
    "tied embeddings": (lambda c: c.update(tie_word_embeddings=True), "'tie_word_embeddings' is True"),
    "no draft vocabulary": (lambda c: c.pop("draft_vocab_size"), "lacks 'draft_vocab_size'"),
    "another draft vocabulary": (lambda c: c.update(draft_vocab_size=DV + 1), r"'lm_head.weight' has shape \[24, 32\]"),
    "short positions": (lambda c: c.pop("max_position_embeddings"), "lacks 'max_position_embeddings'"),
    "rotary keys that disagree": (lambda c: c.update(rope_theta=1.0), "'rope_theta' is 1.0, expected 10000.0"),
    "misspelt key": (
        lambda c: c.update(rms_norm_epsilon=c.pop("rms_norm_eps")),
        "lacks 'rms_norm_eps'",
    ),
    "an unknown key": (lambda c: c.update(norm_output=True), "holds 'norm_output', which is not in the engine's table"),
    "no provenance": (lambda c: c.pop("eyrie"), "lacks the 'eyrie' block"),
    "layers beyond the target": (
        lambda c: (
            c["eyrie"].update(layers=[2, 4, 9]),
            c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 3, 8]),
            c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 9]),
        ),
        "layer 9 lies beyond the target's last, 7",
    ),
    "no layer count": (lambda c: c["eyrie"].pop("target_num_layers"), "'eyrie.target_num_layers' is None"),
    "two layers": (lambda c: c["eyrie"].update(layers=[2, 4]), "describes no drafter"),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_a_fault_in_the_config_is_refused(exported: Path, fault: str) -> None:
    change, why = CONFIG_FAULTS[fault]
    edit_config(exported, change)
    with pytest.raises(EyrieError, match=why):
        read_back(exported)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_and_a_missing_file_are_refused(exported: Path, name: str) -> None:
    path = exported / name
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(EyrieError, match="truncated or no export"):
        read_back(exported)
    path.unlink()
    with pytest.raises(EyrieError, match="missing"):
        read_back(exported)


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"midlayer.hiden_norm.weight": t.pop("midlayer.hidden_norm.weight")}),
        lambda t: t.pop("fc.weight"),
        lambda t: t["fc.weight"].mul_(2),
    ],
)
def test_the_logits_alone_would_show_what_the_loader_swallows(exported: Path, change: Callable[[Tensors], Any]) -> None:
    edit_tensors(exported, change)
    with pytest.raises(EyrieError, match="logits differ from the trainer's"):
        check_same_drafter(make_drafter(), load_as_engine(exported), exported)


def test_the_loader_reads_layers_0_as_the_draft_layer(exported: Path) -> None:
    edit_tensors(exported, lambda t: [t.update({n.replace("midlayer", "layers.0"): t.pop(n)}) for n in list(t)])
    check_same_drafter(make_drafter(), load_as_engine(exported), exported)


def test_the_loader_falls_back_to_default_layers_and_that_is_noticed(exported: Path) -> None:
    edit_config(exported, lambda c: c.pop("eagle_config"))
    assert load_as_engine(exported).config.layers == (2, 4, 5)
    other = make_drafter(layers=(1, 4, 6))
    with pytest.raises(EyrieError, match=r"another drafter \(layers \(2, 4, 5\) instead of \(1, 4, 6\)\)"):
        check_same_drafter(other, load_as_engine(exported), exported)


def test_a_wrong_token_map_is_noticed(exported: Path) -> None:
    edit_tensors(exported, lambda t: t["d2t"].add_(torch.arange(DV)))
    with pytest.raises(EyrieError, match="map draft tokens to other target tokens"):
        check_same_drafter(make_drafter(), load_as_engine(exported), exported)


@pytest.mark.parametrize(
    ("model_type", "layers", "ids"),
    [
        ("llama", (2, 4, 5), [1, 3, 4]),
        ("qwen3", (1, 4, 6), [0, 3, 5]),
        ("deepseek_v3", (2, 30, 58), [1, 29, 57]),
        ("deepseek_v3", (3, 30, 58), [3, 30, 58]),
        ("kimi_k2", (0, 30, 58), [0, 30, 58]),
        ("gpt_oss", (2, 12, 21), [1, 11, 20]),
    ],
)
def test_layer_ids_by_family(model_type: str, layers: tuple[int, int, int], ids: list[int]) -> None:
    assert engine_layer_ids(layers, model_type) == ids


@pytest.mark.parametrize(
    ("model_type", "layers"), [("llama", (0, 4, 5)), ("deepseek_v3", (1, 30, 58)), ("gpt_oss", (3, 12, 21))]
)
def test_layers_that_the_engine_cannot_be_asked_for_are_refused(model_type: str, layers: tuple[int, int, int]) -> None:
    with pytest.raises(EyrieError, match=f"cannot capture .* of a {model_type} target"):
        engine_layer_ids(layers, model_type)


@given(
    layers=st.lists(st.integers(0, 40), min_size=3, max_size=3, unique=True).map(sorted),
    model_type=st.sampled_from(["llama", "deepseek_v3", "glm4_moe_lite", "gpt_oss"]),
)
def test_the_engine_captures_what_it_is_asked_for(layers: list[int], model_type: str) -> None:
    try:
        ids = engine_layer_ids(tuple(layers), model_type)
    except EyrieError:
        assert layers[0] != 2
        return
    assert captured_layers(ids, model_type) == tuple(layers)


@given(kept=st.sets(st.integers(0, 60), min_size=1))
def test_every_map_of_offsets_passes(kept: set[int]) -> None:
    ids = torch.tensor(sorted(kept))
    t2d = torch.zeros(61, dtype=torch.bool)
    t2d[ids] = True
    check_vocabulary(ids - torch.arange(len(ids)), t2d, Path("x"))


def test_a_failed_export_publishes_nothing(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match="cannot capture"):
        run(tmp_path, make_drafter(layers=(0, 4, 5)))
    assert [path for path in (tmp_path / "export").rglob("*") if path.is_file()] == []


def test_a_drafter_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    drafter = make_drafter()
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    with pytest.raises(EyrieError, match=r"'norm\.weight' holds NaN or infinity; train the drafter again"):
        run(tmp_path, drafter)
    assert [path for path in (tmp_path / "export").rglob("*") if path.is_file()] == []


def test_a_drafter_of_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match="was made for another target"):
        run(tmp_path, card=card_of(target="f" * 64))


def test_an_edited_drafter_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    source = tmp_path / "drafters" / "eagle3"
    edit_tensors(source, lambda t: t["fc.weight"].mul_(2))
    with pytest.raises(EyrieError, match="bytes differ from its manifest's hash"):
        export({}, drafter=source, target=tmp_path / "target.json", out=tmp_path / "export" / "sglang")
    assert manifest_path(tmp_path / "export" / "sglang" / "model.safetensors").exists()


def test_an_engine_without_a_layout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EyrieError, match="no layout for engine 'nosuch'; known are sglang"):
        run(tmp_path, engine="nosuch")
