"""What the report and the preview read from JSON: the merge's summary and a benchmark's figures."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

SPLITS = ("train", "validation", "test")


class Figures(BaseModel):
    """Base of what is read from JSON; keys that the report does not show are passed over."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Spread(Figures):
    median: float
    low: float
    high: float


class Verdict(Figures):
    deploy: bool
    sentence: str


class BenchDataset(Figures):
    """Held-out figures of one dataset; ``per_position`` is survival, see :class:`Bench`."""

    name: str
    prompts: int
    tokens: int
    acceptance_length: float
    ngram_acceptance_length: float
    per_position: list[float]
    speedup: float | None = None


class NearTies(Figures):
    """Positions where a narrower dtype chooses another token; ``largest_gap`` in float32 logits."""

    tokens: int
    differing: int
    largest_gap: float
    dtype: str


class Machine(Figures):
    cpu: str
    cores: int | None = None
    threads: int | None = None
    dtype: str = ""
    torch: str = ""
    instructions: str = ""


class TraceStep(Figures):
    """One verify: the drafts that were accepted, the target's own next token, and the first draft it refused."""

    accepted: list[str]
    bonus: str
    refused: str | None = None


class SampleTrace(Figures):
    dataset: str
    prompt: str
    steps: list[TraceStep]


class Request(Figures):
    dataset: str
    acceptance_length: float
    tokens: int
    verifies: int


class Bench(Figures):
    """``bench/<dr>/<suite>.json``.

    ``per_position[i]`` is the share of verifies in which drafts 0..i were all accepted; ``conditional[i]`` the share
    among those that reached draft i; ``break_even`` the acceptance length from which drafting pays on this machine.
    """

    acceptance_length: float
    ngram_acceptance_length: float
    speedup: Spread
    ngram_speedup: Spread | None = None
    lossless_float32: bool
    differing_prompts: list[str] = []
    per_position: list[float]
    conditional: list[float]
    break_even: float
    step_cost_ratio: Spread | None = None
    verdict: Verdict
    plain_tokens_per_s: Spread
    speculative_tokens_per_s: Spread
    ngram_tokens_per_s: Spread
    draft_tokens: int
    prompts: int
    tokens: int
    max_tokens: int | None = None
    repeats: int | None = None
    timed_prompts: int | None = None
    datasets: list[BenchDataset]
    per_request: list[Request] = []
    near_ties: NearTies | None = None
    machine: Machine | None = None
    sample_trace: SampleTrace | None = None

    @property
    def gain(self) -> float:
        """Acceptance length above prompt lookup's."""
        return self.acceptance_length - self.ngram_acceptance_length


class Split(Figures):
    rows: int
    tokens: int
    completion_tokens: int


class MergedDataset(Figures):
    rows: int
    conversations: int
    left_out: dict[str, int]
    splits: dict[str, Split]
    share: float
    over_share: bool
    coverage: float | None


class Lengths(Figures):
    """``histogram``: lower edge of a bar, ``step`` tokens wide -> rows."""

    step: int
    histogram: dict[int, int]
    longest: int | None


class BatchFill(Figures):
    """Batches of one size: mean rows, padding among padded tokens, row tokens among ``batch_tokens``."""

    rows_per_batch: float
    padding_share: float
    filled_share: float


class Packing(Figures):
    """How training rows fill batches: percentile -> tokens per row, and ``batch_tokens`` -> what such batches hold."""

    tokens_per_row: dict[int, int]
    completion_tokens_per_row: dict[int, int]
    batches: dict[int, BatchFill]


class Coverage(Figures):
    """Share of supervised tokens that the draft vocabulary holds."""

    all: float | None
    train: float | None
    held_out: float | None
    held_out_by_dataset: dict[str, float | None] = {}


class DraftVocabulary(Figures):
    size: int
    kept_from: str | None
    supervised_ids_in_train: int
    coverage: Coverage


class Merged(Figures):
    """``merged/summary.json``."""

    rows: dict[str, int]
    splits: dict[str, Split]
    left_out: dict[str, int]
    datasets: dict[str, MergedDataset]
    lengths: Lengths
    packing: Packing
    draft_vocabulary: DraftVocabulary
    warnings: list[str]
