"""STATUS.md: the engineering record of a run, generated and so never stale."""

from __future__ import annotations

from eyrie.report import words
from eyrie.report.advice import accuracy_gap, next_steps, shown
from eyrie.report.collect import DrafterRun, Run
from eyrie.report.page import environment, held_out_note, stages, title


def render_status(run: Run) -> str:
    templates = environment()
    templates.filters["cell"] = cell
    return templates.get_template("status.md.jinja").render(
        run=run,
        title=title(run),
        folder=shown(run.folder),
        instructions=standing_instructions(run),
        discoveries=discoveries(run),
        stages=stages(run),
        steps=next_steps(run),
        held_out=held_out_note,
    )


def cell(text: str) -> str:
    """Text that cannot end a table cell or its row."""
    return " ".join(text.split()).replace("|", "\\|")


def standing_instructions(run: Run) -> list[str]:
    """The choices of the config that every stage must keep to."""
    config = run.config
    budgets = ", ".join(f"{d.name} {d.options.token_budget:,}" for d in run.datasets)
    found = [
        f"Imitate {config.target.model}, sampled at temperature {config.sampling.temperature:g}, "
        f"at most {config.sampling.max_tokens} tokens an answer.",
        f"Completion tokens: {budgets}.",
        f"Rows hold at most {config.tokenize.max_length:,} tokens; answers cut off are "
        + ("dropped." if config.tokenize.truncated == "drop" else "kept."),
        f"Held out by prompt: {words.share(config.merge.validation_fraction, 0)} for validation, "
        f"{words.share(config.merge.test_fraction, 0)} for the benchmark.",
        f"The drafter may propose {config.merge.draft_vocab_size:,} of the target's tokens.",
    ]
    for drafter in run.drafters:
        options = drafter.options
        found.append(
            f"Drafter {drafter.name}: {options.algorithm}, {words.plural(options.ttt_steps, 'TTT step')}, "
            f"{options.epochs:g} {'epoch' if options.epochs == 1 else 'epochs'}, "
            f"started from {'the target' if options.init == 'target' else 'scratch'}."
        )
    for name, suite in config.bench.suites.items():
        source = suite.dataset or "this run's test split"
        found.append(
            f"Suite {name}: {source}, chains of {words.plural(suite.draft_tokens, 'draft')}, "
            f"{suite.max_tokens} tokens a prompt."
        )
    return found


def discoveries(run: Run) -> list[str]:
    """Measured facts, none of them from the config."""
    found = []
    for dataset in run.datasets:
        source = dataset.responses
        if source and source.kept:
            cut = source.facts["truncated"]
            found.append(
                f"{dataset.name}: {words.plural(source.kept, 'answer')} of "
                f"{source.tokens['completion'] / source.kept:.0f} tokens on average, "
                f"{words.share(cut / source.kept)} cut off."
            )
    if run.merged:
        vocabulary = run.merged.draft_vocabulary
        found.append(
            f"The draft vocabulary holds {words.share(vocabulary.coverage.held_out)} of the held-out completion tokens "
            f"({vocabulary.supervised_ids_in_train:,} ids occur in training)."
        )
    for drafter in run.drafters:
        found += _training(drafter)
    for drafter, suite, bench in run.measured:
        by_dataset = ", ".join(f"{d.name} {d.acceptance_length:.2f}" for d in bench.datasets)
        found += [
            f"{drafter.name} on {suite.name}: acceptance length {bench.acceptance_length:.2f} ({by_dataset}), "
            f"prompt lookup {bench.ngram_acceptance_length:.2f}.",
            f"{drafter.name} on {suite.name}: {bench.speedup.median:.2f} times plain decoding "
            f"({bench.speedup.low:.2f} to {bench.speedup.high:.2f}); it pays from an acceptance length of "
            f"{bench.break_even:.2f} on.",
        ]
    return found


def _training(drafter: DrafterRun) -> list[str]:
    best, found = drafter.best, []
    if best is not None:
        found.append(
            f"{drafter.name}: best simulated acceptance length {best.acceptance_length:.2f}, after "
            f"{best.tokens_seen:,} completion tokens visited."
        )
    gap = accuracy_gap(drafter)
    if gap is not None:
        found.append(f"{drafter.name}: first guesses {100 * gap:+.1f} points on training rows against validation rows.")
    return found
