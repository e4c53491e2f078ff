"""What the figures say to do next, the most urgent first. Shared by the page and STATUS.md."""

from __future__ import annotations

from dataclasses import dataclass

from eyrie.report import words
from eyrie.report.collect import DatasetRun, DrafterRun, Point, Run, Step, SuiteRun
from eyrie.report.figures import Bench

WIRING_FAULT = 1.05  # acceptance length; a drafter that is merely weak gets more
CUT_SHARE = 0.25  # of a dataset's answers cut at max_tokens: from here on it is worth a word
COVERAGE = 0.93  # of held-out completion tokens: below it the draft vocabulary itself costs acceptance
OVERFIT = 0.12  # training accuracy over validation accuracy
STALE_BEST = 0.75  # the best validation this early means that the rest of the training was lost
FILLED = 0.995  # of a budget


@dataclass(frozen=True)
class Advice:
    """One thing to do; ``command`` does it, where a command can."""

    text: str
    command: str = ""


def next_steps(run: Run) -> list[Advice]:
    """Never empty."""
    found = _missing(run)
    for drafter, suite, bench in run.measured:
        found += _from_bench(run, drafter, suite, bench)
    for drafter in run.drafters:
        found += _from_training(drafter)
    found += _from_data(run)
    return found or [Advice("Nothing is pending.")]


def _missing(run: Run) -> list[Advice]:
    steps: list[tuple[str, Step]] = [
        ("prompt shard", run.step("prompts")),
        ("response shard", run.step("responses")),
        ("token shard", run.step("rows")),
        ("merged file", run.index),
        ("hidden shard", run.step("hidden")),
        ("drafter", Step.total(d.weights for d in run.drafters)),
        ("export", Step.total(d.export for d in run.drafters)),
    ]
    found = [f"{len(step.missing)} of {words.plural(step.expected, noun)}" for noun, step in steps if not step.complete]
    open_suites = [suite for drafter in run.drafters for suite in drafter.suites if suite.figures is None]
    if open_suites:
        total = sum(len(drafter.suites) for drafter in run.drafters)
        found.append(f"{len(open_suites)} of {words.plural(total, 'benchmark')}")
    if not found:
        return []
    return [Advice(f"Still to be made: {', '.join(found)}.", "snakemake")]


def _from_bench(run: Run, drafter: DrafterRun, suite: SuiteRun, bench: Bench) -> list[Advice]:
    where = f"{drafter.name} on {suite.name}"
    if not bench.lossless_float32:
        return [
            Advice(
                f"{where}: {words.plural(len(bench.differing_prompts), 'prompt')} came out otherwise than by plain "
                "decoding, so the decoder is at fault; do not serve this before it is found."
            )
        ]
    if bench.verdict.deploy:
        folder = run.folder / "export" / drafter.name / "sglang"
        found = [Advice(f"{where}: worth deploying; serve the export in {shown(folder)}.")]
    elif bench.acceptance_length < WIRING_FAULT:
        return [Advice(f"{where}: no draft is accepted; check layer ids, key names and the draft vocabulary first.")]
    else:
        seen = drafter.trained.tokens.get("seen") if drafter.trained else None
        visited = f" ({words.short(seen)} so far)" if seen else ""
        found = [
            Advice(
                f"{where}: not worth deploying yet. Visit more completion tokens{visited}: raise "
                f"datasets.*.token_budget first, then drafters.{drafter.name}.epochs."
            )
        ]
    weak = [d.name for d in bench.datasets if d.acceptance_length < bench.break_even]
    if weak and len(weak) < len(bench.datasets):
        found.append(
            Advice(
                f"{where}: below break-even on {', '.join(weak)}; give them a larger token budget or a higher weight."
            )
        )
    lost = [d.name for d in bench.datasets if d.acceptance_length <= d.ngram_acceptance_length]
    if lost:
        found.append(Advice(f"{where}: prompt lookup, which costs nothing, does as well on {', '.join(lost)}."))
    if bench.draft_tokens > drafter.options.ttt_steps:
        found.append(
            Advice(
                f"{where}: {bench.draft_tokens} tokens are drafted, {drafter.options.ttt_steps} were rehearsed; raise "
                f"drafters.{drafter.name}.ttt_steps or lower bench.suites.{suite.name}.draft_tokens."
            )
        )
    return found


def _from_training(drafter: DrafterRun) -> list[Advice]:
    best, validation = drafter.best, drafter.validation
    if best is None or len(validation) < 3:
        return []
    last = validation[-1]
    if best.step < STALE_BEST * last.step:
        return [
            Advice(
                f"{drafter.name}: the best validation came at step {best.step:,} of {last.step:,}; "
                "fewer epochs would have done, more data would help."
            )
        ]
    gap = accuracy_gap(drafter)
    if gap is not None and gap > OVERFIT:
        return [
            Advice(
                f"{drafter.name}: first guesses are right {100 * gap:.0f} points more often on training rows than on "
                "validation rows; more data would help more than more epochs."
            )
        ]
    if best is last:
        return [Advice(f"{drafter.name}: still improving when training ended; raise drafters.{drafter.name}.epochs.")]
    return []


def accuracy_gap(drafter: DrafterRun) -> float | None:
    """Step-1 accuracy on training rows (the last tenth of the steps) less that on validation rows."""
    tail = drafter.train[-max(1, len(drafter.train) // 10) :]
    seen = [value for point in tail if (value := _first(point)) is not None]
    held = _first(drafter.validation[-1]) if drafter.validation else None
    return sum(seen) / len(seen) - held if seen and held is not None else None


def _first(point: Point) -> float | None:
    return point.accuracy[0] if point.accuracy else None


def _from_data(run: Run) -> list[Advice]:
    found = [Advice(f"{warning[0].upper()}{warning[1:]}.") for warning in (run.merged.warnings if run.merged else [])]
    for dataset in run.datasets:
        found += _budget(dataset)
        cut, answers = _cut(dataset)
        if run.config.tokenize.truncated == "drop" and answers and cut / answers > CUT_SHARE:
            found.append(
                Advice(
                    f"{dataset.name}: {words.share(cut / answers, 0)} of the answers were cut at "
                    f"{dataset.options.sampling.max_tokens} tokens and dropped; raise its sampling.max_tokens, "
                    "or keep them with tokenize.truncated."
                )
            )
    held_out = run.merged.draft_vocabulary.coverage.held_out if run.merged else None
    if run.merged and held_out is not None and held_out < COVERAGE:
        found.append(
            Advice(
                f"The draft vocabulary holds {words.share(held_out)} of the held-out completion tokens; "
                f"raise merge.draft_vocab_size ({run.merged.draft_vocabulary.size:,})."
            )
        )
    return found


def _budget(dataset: DatasetRun) -> list[Advice]:
    source = dataset.responses or dataset.rows
    have, want = dataset.completion_tokens, dataset.options.token_budget
    if not source.complete or have >= FILLED * want:
        return []
    return [
        Advice(
            f"{dataset.name}: holds {have:,} of {want:,} completion tokens because its prompts ran out; "
            "raise prompts_per_shard, or lower token_budget."
        )
    ]


def _cut(dataset: DatasetRun) -> tuple[int, int]:
    """Answers that ended at max_tokens, and all answers."""
    return (dataset.responses.facts["truncated"], dataset.responses.kept) if dataset.responses else (0, 0)


def shown(path: object) -> str:
    """A path of the run as the reader types it: from ``results/`` on."""
    text = str(path)
    at = text.rfind("results/")
    return text[at:] if at >= 0 else text
