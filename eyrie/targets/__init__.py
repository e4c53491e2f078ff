"""Target models: what they are (the card) and where their files come from."""

from eyrie.targets.card import TargetCard, default_layers, identify, read_card, resolve
from eyrie.targets.convert import convert_gguf

__all__ = ["TargetCard", "convert_gguf", "default_layers", "identify", "read_card", "resolve"]
