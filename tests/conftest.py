"""Fixtures that several rooms share: a tiny target model with a real tokenizer and chat template."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

DEFAULT_SYSTEM = "You are a helpful AI assistant."

CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\n" + DEFAULT_SYSTEM + "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SENTENCES = [
    "You are a helpful AI assistant. How can I help you today?",
    "The quick brown fox jumps over the lazy dog while the user reads a book about the weather.",
    "def add(a, b):\n    return a + b\n\nfor item in range(10):\n    print(item)\n",
    "Please write a short letter to my friend and tell her what the assistant said about the system.",
    "What is the capital of France? The capital of France is Paris.",
    "Complete the following Python function. It returns the sum of two numbers.",
]


def build_tokenizer(folder: Path, *, template: str | None = CHATML, vocab_size: int = 600) -> None:
    """Train a byte-level BPE on a few sentences and save it as a Hugging Face tokenizer in ``folder``.

    Special ids: 0 ``<|endoftext|>``, 1 ``<|im_start|>`` (bos), 2 ``<|im_end|>`` (eos), as in SmolLM2.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def build_target(folder: Path) -> None:
    """A Hugging Face folder: random Llama (6 layers, hidden 64, 4 heads, 2 kv heads, vocab 600, tied, bf16).

    ChatML template with a default system line, as SmolLM2 has it; eos and stop id is ``<|im_end|>`` (2).
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=600,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.15,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    build_tokenizer(folder)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of :func:`build_target`, made once."""
    folder = tmp_path_factory.mktemp("tiny-target")
    build_target(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_library(tiny_target: Path):  # type: ignore[no-untyped-def]
    """``tiny_target`` as transformers runs it, in float32: what every decoder of ours is held against."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def serving_python() -> Path:
    """The interpreter that `make serve-cpu` makes (as `make test` does)."""
    root = Path(__file__).resolve().parents[1]
    if not list(root.glob(".venv-serve/ready-*")):
        pytest.skip("no .venv-serve: make it with `make serve-cpu`")
    return root / ".venv-serve" / "bin" / "python"


@pytest.fixture(scope="session")
def long_serving_python(serving_python: Path) -> Path:
    """The same, for tests that start several real servers; it takes EYRIE_SERVE_CPU=1 to run these minutes."""
    if os.environ.get("EYRIE_SERVE_CPU") != "1":
        pytest.skip("starts several real servers: set EYRIE_SERVE_CPU=1 to run it")
    return serving_python
