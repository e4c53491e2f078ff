"""Small tokenizers with the control tokens and the kind of template of each target family, and a config beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tests.conftest import CHATML, SENTENCES

FIXTURES = Path(__file__).parent / "fixtures"
TEMPLATES = FIXTURES / "templates"

CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_TEXT = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"]
DEEPSEEK_TEXT = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]  # added tokens that are not flagged as special
LLAMA = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
         "<|python_tag|>"]  # fmt: skip
HARMONY = ["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
           "<|message|>", "<|call|>"]  # fmt: skip

KIMI_IDS = {
    "[BOS]": 163584,
    "[EOS]": 163585,
    "<|im_end|>": 163586,
    "<|im_user|>": 163587,
    "<|im_assistant|>": 163588,
    "<|reserved_token_163589|>": 163589,
    "[EOT]": 163593,
    "<|im_system|>": 163594,
    "<|tool_calls_section_begin|>": 163595,
    "<|tool_calls_section_end|>": 163596,
    "<|tool_call_begin|>": 163597,
    "<|tool_call_argument_begin|>": 163598,
    "<|tool_call_end|>": 163599,
    "<|im_middle|>": 163601,
    "<think>": 163606,
    "</think>": 163607,
    "[UNK]": 163838,
    "[PAD]": 163839,
}

# name: special tokens, added tokens that are not special, bos, eos, template
FAMILIES: dict[str, tuple[list[str], list[str], str | None, str, str]] = {
    "chatml": (CHATML_TOKENS, [], None, "<|im_end|>", CHATML),
    "qwen3": (CHATML_TOKENS, QWEN_TEXT, None, "<|im_end|>", "qwen3"),
    "llama-3": (LLAMA, [], "<|begin_of_text|>", "<|eot_id|>", "llama-3"),
    "deepseek-r1": (DEEPSEEK, DEEPSEEK_TEXT, DEEPSEEK[0], DEEPSEEK[1], "deepseek-r1"),
    "deepseek-v3.1": (DEEPSEEK, DEEPSEEK_TEXT, DEEPSEEK[0], DEEPSEEK[1], "deepseek-v3.1"),
    "gpt-oss": (HARMONY, [], None, "<|return|>", "gpt-oss"),
}


def base_bpe() -> dict[str, Any]:
    """A byte-level BPE without added tokens, as the content of a ``tokenizer.json``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        SENTENCES, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return json.loads(bpe.to_str())


def write_target(folder: Path, tokens: dict[str, tuple[int, bool]], template: str, eos: str, **extra: Any) -> Path:
    """A folder with tokenizer, template and config; no weights.

    Args:
        tokens: control string -> id and whether it is flagged as special. Ids may leave gaps.
        template: text, or the name of a file in ``tests/fixtures/templates``.
        extra: further keys of ``tokenizer_config.json``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = base_bpe()
    content["model"]["vocab"] |= {name: id for name, (id, _) in tokens.items()}
    content["added_tokens"] = [
        {"id": id, "content": name, "special": special, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for name, (id, special) in tokens.items()
    ]  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": eos, **extra}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    path = TEMPLATES / f"{template}.jinja"
    text = path.read_text(encoding="utf-8") if path.name == f"{template}.jinja" and len(template) < 40 else template
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    vocab = 1 + max(content["model"]["vocab"].values())
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 6, "hidden_size": 64,
             "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": vocab,
             "max_position_embeddings": 1024, "eos_token_id": tokens[eos][0]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def family_target(name: str, folder: Path, template: str | None = None) -> Path:
    """The small target of a family (a key of :data:`FAMILIES`), perhaps under another template."""
    special, text, bos, eos, own = FAMILIES[name]
    first = 500
    tokens = {token: (first + i, token in special) for i, token in enumerate([*special, *text])}
    return write_target(folder, tokens, template or own, eos, **({"bos_token": bos} if bos else {}))


def kimi_target(folder: Path, shift: int = 0) -> Path:
    """Real ids in a small tokenizer, with code of its own. ``shift``: how far ids behind the first gap have moved."""
    tokens = {
        name: (id - shift if 163589 < id < 163838 else id, not name.endswith("think>")) for name, id in KIMI_IDS.items()
    }
    auto = {"auto_map": {"AutoTokenizer": [None, "tokenization_small.SmallTokenizer"]}}
    extra = {"tokenizer_class": "SmallTokenizer", "bos_token": "[BOS]", **auto}
    write_target(folder, tokens, "kimi-k2", "[EOS]", **extra)
    shutil.copy(FIXTURES / "tokenization_small.py", folder)
    return folder
