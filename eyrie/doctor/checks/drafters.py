"""Exported drafters: what an engine would take silently, and whether they pay."""

from __future__ import annotations

import json

from eyrie.config import Config
from eyrie.doctor.finding import Finding, does_not_apply, green, red, yellow
from eyrie.doctor.readings import Readings

NOT_YET = does_not_apply("no drafter of this run is exported yet")
LARGEST_GAP = 0.2
"""Share of the acceptance length that serving may cost against the reference decoder."""
EXPORT_AGAIN = "export again with `snakemake -R export`"


def draft_algorithm(readings: Readings, config: Config) -> Finding:
    """An EAGLE-3 drafter is served as EAGLE3: with EAGLE, SGLang starts without a word and accepts nothing."""
    from eyrie.bench.stats import WIRING_FAULT  # it brings torch, which generation's checks do without

    faked = sorted(name for name in readings.environment if name.startswith("SGLANG_SIMULATE_ACC"))
    if faked:
        return red(f"{faked[0]} is set and fakes the acceptance", f"unset {faked[0]}")
    exports = readings.run.exports
    if not exports:
        return NOT_YET
    wrong = [
        f"{name}: {architectures or 'no architecture'}"
        for name, export in exports.items()
        if "eagle3" not in (architectures := " ".join(export.config.get("architectures") or [])).lower()
    ]
    if wrong:
        return red(f"no EAGLE-3 drafter: {'; '.join(wrong)}", EXPORT_AGAIN)
    for name, export in exports.items():
        if export.served is not None and export.served < WIRING_FAULT:
            return red(
                f"{name}: acceptance length {export.served:.2f} on the server, no draft is accepted",
                "a wiring fault: algorithm, layer ids, tensor names, draft vocabulary, target, in this order",
            )
    return green(f"{', '.join(exports)}: EAGLE-3 architecture, served as EAGLE3")


def draft_weights(readings: Readings, config: Config) -> Finding:
    """Names, shapes and values of the exported tensors: an engine drops what it does not know."""
    return _gated({name: export.weights for name, export in readings.run.exports.items()}, "tensors and config")


def draft_vocabulary(readings: Readings, config: Config) -> Finding:
    """The token map: offsets that name distinct tokens of the target, those of the merge."""
    exports = readings.run.exports
    found = _gated({name: export.vocabulary for name, export in exports.items()}, "token maps")
    coverage = [export.coverage for export in exports.values() if export.coverage is not None]
    if found.verdict != "green" or not coverage:
        return found
    text = f"{found.evidence}; the draft vocabulary covers {100 * coverage[0]:.1f}% of the supervised tokens"
    return green(text) if coverage[0] >= 0.9 else yellow(text, "raise merge.draft_vocab_size")


def _gated(faults: dict[str, str], what: str) -> Finding:
    if not faults:
        return NOT_YET
    said = [fault for fault in faults.values() if fault]
    return red("; ".join(said), EXPORT_AGAIN) if said else green(f"{', '.join(faults)}: {what} as the layout demands")


def draft_context(readings: Readings, config: Config) -> Finding:
    """Positions that the drafter knows, against those that are served."""
    exports = readings.run.exports
    if not exports:
        return NOT_YET
    served = config.server.context_length or readings.run.context
    if served is None:
        return does_not_apply("neither server.context_length nor the target's own length is known")
    for name, export in exports.items():
        known = export.config.get("max_position_embeddings")
        if isinstance(known, int) and known < served:
            return yellow(
                f"{name} knows {known:,} positions, {served:,} are served",
                f"set server.context_length to {known}: beyond it acceptance falls",
            )
    return green(f"{served:,} positions are served and every drafter knows them")


def break_even(readings: Readings, config: Config) -> Finding:
    """What the benchmark says about deploying."""
    exports = {name: export for name, export in readings.run.exports.items() if export.suites}
    if not exports:
        return does_not_apply("no drafter of this run is benchmarked yet")
    bad = [f"{name} on {suite}: {said}" for name, export in exports.items() for suite, said in export.verdicts.items()]
    if bad:
        return yellow("; ".join(bad), "measure on the machine that will serve; more data or prompt lookup otherwise")
    measured = json.dumps({name: export.suites for name, export in exports.items()}).replace('"', "")
    return green(f"the benchmark advises to deploy, acceptance length {measured}")


def acceptance_gap(readings: Readings, config: Config) -> Finding:
    """Acceptance on the engine against the reference decoder, and in the benchmark against training."""
    exports = readings.run.exports
    served = [(name, export.served, export.reference) for name, export in exports.items() if export.served]
    rehearsed = [
        (name, max(export.suites.values()), export.trained) for name, export in exports.items() if export.suites
    ]
    pairs = [(*pair, "on the server", "in the reference decoder") for pair in served]
    pairs += [(*pair, "in the benchmark", "simulated in training") for pair in rehearsed]
    known = [(name, low, where, high, other) for name, low, high, where, other in pairs if low and high]
    if not known:
        return does_not_apply("acceptance is known from one place at most: serve or benchmark a drafter first")
    text = "; ".join(f"{name}: {low:.2f} {where}, {high:.2f} {other}" for name, low, where, high, other in known)
    far = {where for _, low, where, high, _ in known if low < (1 - LARGEST_GAP) * high}
    mend = "suspect the chat template, the layer ids, the order of the norms and the mask, in this order"
    if "on the server" in far:
        return red(text, mend)
    return yellow(text, f"other prompts may explain it; else {mend}") if far else green(text)
