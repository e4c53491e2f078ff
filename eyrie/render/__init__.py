"""Conversations to token ids and back: the target's chat template, its control ids, and what an answer said."""
