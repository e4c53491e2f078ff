"""A target's tokenizer and its chat template, as transformers loads them."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from eyrie.errors import EyrieError

TEMPLATE_ERRORS = (TemplateError, TypeError)  # what a template raises that refuses a conversation

# Templates call the reasoning by one of these names.
REASONING_KEYS = ("reasoning", "reasoning_content", "thinking")

# Some templates (Llama 3.2, gpt-oss) write the day into every prompt. It is always this one: a prompt that changes at
# midnight would give other rows, and other answers to the same seed.
DAY = datetime.datetime(2025, 1, 1)

# Everything that encoding piece by piece could get wrong: edges of white space, scripts, emoji, code.
PROBE_TEXT = (
    " a b\nc  def f(x):\n\treturn {'k': x}\n\n\u4f60\u597d\uff0c\u4e16\u754c \U0001f426\u200d\U0001f525 caf\u00e9 "
)


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face folder. Raises :class:`EyrieError` when it cannot be loaded."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = " ".join(str(error).split())[:160]
        mend = "copy the tokenizer's files there"
        if "custom code" in why and not trust_remote_code:
            mend = "read that code, then set target.trust_remote_code (for a hub id pin target.revision too)"
        raise EyrieError(f"{folder}: its tokenizer cannot be loaded ({why}); {mend}") from error


def templates_of(tokenizer: Any, folder: Path) -> tuple[str, str]:
    """The chat template without declared tools, and with: the same one unless the tokenizer has a ``tool_use``.

    Raises:
        EyrieError: there is none.
    """
    named = tokenizer.chat_template
    if not isinstance(named, dict):
        named = {"default": named}
    template = named.get("default")
    if not template:
        raise EyrieError(
            f"{folder}: the tokenizer has no chat template; use an instruction-tuned model, or add chat_template.jinja"
        )
    return str(template), str(named.get("tool_use") or template)


class Template:
    """``(messages, tools, generation, arguments) -> text``, as ``apply_chat_template`` gives it.

    The library checks and copies every message on each call, which costs more than the template itself. Its compiled
    template is called directly instead, unless the tokenizer brings its own code or the two disagree on a probe.

    Args:
        folder: named in errors.

    Attributes:
        direct: whether the compiled template is called, so that it can be run piece by piece.
        texts: the template's text without declared tools, and with.

    Raises:
        EyrieError: the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, folder: Path) -> None:
        self._tokenizer = tokenizer
        self.direct = False
        self.texts = templates_of(tokenizer, folder)
        try:
            from transformers import PreTrainedTokenizerBase
            from transformers.utils.chat_template_utils import _compile_jinja_template

            self._compiled, self._names = [*map(_compile_jinja_template, self.texts)], tokenizer.special_tokens_map
            for compiled in self._compiled:
                compiled.globals["strftime_now"] = DAY.strftime  # the library keeps it, and so has the same day
            if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
                return
            probe: list[dict[str, Any]] = [
                {"role": "user", "content": PROBE_TEXT},
                {"role": "assistant", "content": "a", **dict.fromkeys(REASONING_KEYS, "b")},
            ]
            self.direct = all(
                "".join(self.pieces(probe[:n], None, n == 1, {})) == self._called(probe[:n], None, n == 1, {})
                for n in (1, 2)
            )
        except Exception:  # a private part of the library that moved, or a template that refuses the probe
            return

    def __call__(self, messages: list[dict[str, Any]], tools: Any, generation: bool, arguments: dict[str, Any]) -> str:
        if self.direct:
            return "".join(self.pieces(messages, tools, generation, arguments))
        return self._called(messages, tools, generation, arguments)

    def pieces(
        self, messages: Sequence[dict[str, Any]], tools: Any, generation: bool, arguments: dict[str, Any]
    ) -> Iterator[str]:
        """The text in the pieces in which the template writes it; ``direct`` templates only."""
        given = {**self._names, **arguments}
        yield from self._compiled[bool(tools)].generate(
            messages=messages, tools=tools, documents=None, add_generation_prompt=generation, **given
        )

    def _called(self, messages: list[dict[str, Any]], tools: Any, generation: bool, arguments: dict[str, Any]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=generation, tokenize=False, **arguments
            )
        )
