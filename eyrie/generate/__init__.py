"""Answers of the target within a token budget: who is asked next, what was paid for, how long it will take."""
