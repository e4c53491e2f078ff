"""The host, the disk, who answers, and the state of the workflow."""

from __future__ import annotations

from datetime import UTC, datetime

from eyrie.config import Config
from eyrie.doctor.finding import Finding, does_not_apply, gib, green, red, yellow
from eyrie.doctor.readings import GIB, Readings
from eyrie.engines.hire import KEYS

STATES = 4  # per token and hidden size: three captured layers and the final state
STORED_BYTES = {"bfloat16": 2, "float32": 4}
SPARE = 1.1
NETWORK_KINDS = ("nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "fuse.gcsfuse", "fuse.s3fs")
OPEN_FILES = 128
"""Files that a job opens besides its connections."""
EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)
SNAKEMAKE = (9, 27)


def tokenizer(readings: Readings, config: Config) -> Finding:
    """What the start-up self-test of tokenizer and chat template found."""
    if not readings.run.identified:
        return does_not_apply("the target is not identified yet; identifying it runs the self-test")
    if readings.run.tokenizer_faults:
        return red(
            "; ".join(readings.run.tokenizer_faults),
            "every chat turn would be rejected: use the chat template of an instruction-tuned model",
        )
    if readings.run.tokenizer_notes:
        return yellow(
            "; ".join(readings.run.tokenizer_notes), "look at some rows: `snakemake results/<run>/preview.html`"
        )
    return green("the self-test of tokenizer and chat template passed")


def disk(readings: Readings, config: Config) -> Finding:
    """Room for hidden states and training, and a file system that can lock."""
    run = readings.run
    if not readings.disks:
        return does_not_apply("no file system was read")
    place = readings.disks[0]
    network = [disk for disk in readings.disks if disk.kind in NETWORK_KINDS]
    if run.hidden_size is None:
        size = "the target's size is not known yet, so neither is that of its hidden states"
        needed = GIB
    else:
        budget = sum(dataset.token_budget for dataset in config.datasets.values())
        tokens = max(budget, run.row_tokens)
        states = STATES * run.hidden_size * STORED_BYTES[config.hidden.storage_dtype] * tokens
        needed = int(SPARE * (max(0, states - run.hidden_bytes) + run.drafter_bytes)) + GIB
        size = (
            f"at least {gib(states)} of hidden states for {tokens:,} tokens ({gib(run.hidden_bytes)} are there) and "
            f"{gib(run.drafter_bytes)} of training state"
        )
    evidence = f"{place.path} ({place.kind}): {gib(place.free)} free, {gib(needed)} needed: {size}"
    if place.free < needed:
        return red(evidence, "free space, put the working directory elsewhere, or lower the token budgets")
    if network:
        return yellow(
            f"{evidence}; {network[0].path} lies on {network[0].kind}",
            "make sure that file locks work there, and that only one machine answers a shard",
        )
    return green(evidence)


def answerers(readings: Readings, config: Config) -> Finding:
    """Who answers: a key where one is needed, ports that are open."""
    kind = config.engine.kind
    if kind == "openrouter":
        name = KEYS["openrouter"]
        if name not in readings.environment:
            return red(f"the environment has no {name}", f"export {name}=..., never in the config")
        return green(f"{name} is set; price, providers and credit are checked before the first request")
    if not config.engine.urls:
        return does_not_apply("the target answers in this process or on a server that Eyrie starts")
    closed = [url for url in config.engine.urls if not readings.reached.get(url, False)]
    if closed:
        return yellow(
            f"{len(closed)} of {len(config.engine.urls)} servers do not listen: {', '.join(closed)}",
            f"start them or mend engine.urls; a run waits {config.engine.outage:.0f} s for one that answers",
        )
    return green(f"{len(config.engine.urls)} servers listen")


def workflow_state(readings: Readings, config: Config) -> Finding:
    """Snakemake's own state: version, half-made outputs, a lock."""
    text = readings.versions.get("snakemake", "")
    version = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    if version < SNAKEMAKE:
        return red(
            f"Snakemake {text or 'is not installed'}, needed is {'.'.join(map(str, SNAKEMAKE))}",
            "install envs/host.txt",
        )
    if readings.run.incomplete:
        shown = ", ".join(readings.run.incomplete[:5])
        return yellow(
            f"{len(readings.run.incomplete)} outputs are half-made: {shown}",
            "nothing to do: the next run makes them again; `snakemake -n` says why",
        )
    lock = "; the folder is locked by a Snakemake, which may be this one" if readings.run.locked else ""
    return green(f"Snakemake {text}, no half-made output{lock}; `snakemake -n` lists what would run, and why")


def host_limits(readings: Readings, config: Config) -> Finding:
    """Open files, the clock."""
    host = readings.host
    needed = OPEN_FILES + (config.engine.concurrency if config.engine.kind != "transformers" else 0)
    if host.open_files < needed:
        return red(
            f"{host.open_files} files may be open, {needed} are needed for engine.concurrency "
            f"{config.engine.concurrency}",
            f"`ulimit -n {max(4096, needed)}`, or lower engine.concurrency",
        )
    if host.clock < EARLIEST:
        return red(f"the clock says {host.clock:%Y-%m-%d}", "set it: certificates and file times depend on it")
    return green(f"{host.open_files:,} files may be open, the clock says {host.clock:%Y-%m-%d}")
