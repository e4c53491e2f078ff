"""What every stage shares: the checked config, the names on disk, and a few named helpers.

This file is parsed again in every job, so it imports nothing heavy and touches no network.
"""

import os
import re
import sys
import time
import weakref
from pathlib import Path

import yaml
from snakemake.exceptions import WorkflowError

# Eyrie may be used from a plain checkout, and its own interpreter must be the `python` of every job.
sys.path.insert(0, str(workflow.basedir))
# threads that wait for the next loop burn the cores that another job could use: OpenMP's give up soon here
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
os.environ.update(PATH=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]))

from eyrie.config import parse_config, read_options
from eyrie.errors import EyrieError
from eyrie.formats.publish import write_text
from eyrie.orphan import WORKFLOW
from eyrie.recipes import canonical_json, machine_options, recipe
from eyrie.workdir import enter

try:
    CONFIG = parse_config(config, " with ".join(map(str, workflow.configfiles)) or "config")
    if workflow.is_main_process:  # once, not in every job
        for path in workflow.configfiles:
            read_options(Path(path))  # Snakemake's own reader lets a key stand twice
        from eyrie.datasets import check_sources

        check_sources(CONFIG)
except EyrieError as error:
    raise WorkflowError(str(error)) from None

# Locks that a killed Snakemake left are removed here, before this one makes its own; two living ones still refuse each
# other. Jobs parse this file again and have no part in it.
if workflow.is_main_process and (living := enter(Path.cwd())) is not None:
    weakref.finalize(workflow, os.close, living)

# What says *where* work runs (this folder, the model's place, device, batch size) reaches a job as a resource. Those
# are filled into the command after it is recorded, so moving the checkout or the machine makes nothing stale.
SCRIPTS = str(Path(workflow.basedir) / "scripts")

# ---- names on disk ----
RUN = f"results/{CONFIG.run}"
LOGS = f"logs/{CONFIG.run}"
TIMES = f"{RUN}/benchmarks"
MODEL = CONFIG.target.model
CARD = f"{RUN}/target.json"
PROMPTS = "data/prompts/{dataset}/{shard}.jsonl.zst"
RESPONSES = f"{RUN}/responses/{{dataset}}/{{shard}}.jsonl.zst"
TOKENS = f"{RUN}/tokens/{{dataset}}/{{shard}}.parquet"
MERGED = f"{RUN}/merged"
HIDDEN = f"{RUN}/hidden/{{dataset}}/{{shard}}.safetensors"
DRAFTER = f"{RUN}/drafters/{{drafter}}"
EXPORT = f"{RUN}/export/{{drafter}}/sglang"
BENCH = f"{RUN}/bench/{{drafter}}/{{suite}}.json"
SERVE = f"{RUN}/serve/{{drafter}}.json"
REPORT = f"{RUN}/report.html"
STATUS = f"{RUN}/STATUS.md"
PREVIEW = f"{RUN}/preview.html"
DOCTOR = f"{RUN}/doctor.md"
RESOLVED = f"{RUN}/config.resolved.yaml"

SHARDS = [(name, shard) for name, dataset in CONFIG.datasets.items() for shard in dataset.shards]
ANSWERED = [(name, shard) for name, shard in SHARDS if CONFIG.datasets[name].kind == "answered"]

# What `convert_target` makes; empty for a folder or hub id of the user's own.
CONVERTED = (
    [
        f"{MODEL}/{name}"
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors",
        )
    ]
    if CONFIG.target.gguf
    else []
)


wildcard_constraints:
    dataset="|".join(map(re.escape, CONFIG.datasets)),
    shard=r"s\d\d\d\d+",
    drafter="|".join(map(re.escape, CONFIG.drafters)),
    suite="|".join(map(re.escape, CONFIG.bench.suites)),


# ---- helpers ----
def man(path):
    """Manifest beside a data file: the dependency edge. The data itself is an `ancient` input."""
    return f"{path}.manifest.json"


def every(pattern, shards):
    """The pattern filled in for each (dataset, shard), in config order."""
    return [pattern.format(dataset=dataset, shard=shard) for dataset, shard in shards]


def recipe_for(stage):
    """The one param of a rule: what makes the stage's bytes, as canonical JSON."""

    def of(wildcards):
        return canonical_json(recipe(CONFIG, stage, **dict(wildcards.items())))

    return of


def asked_now(wildcards):
    """The recipe of what no file can be up to date with: it is another one each time, so the job always runs."""
    return canonical_json({"asked": time.time_ns()})


def rows_source(wildcards):
    """What a token shard is made from: the target's answers, or for a native dataset the prompt shard itself."""
    native = CONFIG.datasets[wildcards.dataset].kind == "native"
    return (PROMPTS if native else RESPONSES).format(**wildcards)


def rows_source_manifest(wildcards):
    return man(rows_source(wildcards))


def raw_source(wildcards):
    """The user's own file that a dataset reads, if it reads one."""
    return CONFIG.datasets[wildcards.dataset].path or []


def kept_vocabulary(wildcards):
    """The earlier drafter whose draft vocabulary is kept, if the config names one."""
    return CONFIG.merge.draft_vocab_file or []


def checkpoint_every(wildcards):
    return CONFIG.drafters[wildcards.drafter].checkpoint_every


def identity_files():
    """Files that say which model a local folder holds; none for a hub id, whose name and revision say it."""
    if CONFIG.target.gguf:
        return CONVERTED[:-1]  # the weights have a manifest, which is the edge
    folder = Path(MODEL)
    if not folder.is_dir():
        return []
    telling = {".json", ".jinja", ".model", ".txt", ".py", ".safetensors"}
    return sorted(str(path) for path in folder.iterdir() if path.suffix in telling)


def forced_names():
    """Rules and files that the person forced by name with -R/--forcerun or -f/--force.

    A `--forceall` names nothing, so it buys no new answers. Jobs on other machines are started with `--force` by
    Snakemake itself; they are told what the person said through the environment (see `onstart`).
    """
    if not workflow.is_main_process:
        return set(os.environ[FORCED].split())
    settings = workflow.dag_settings
    named = set(settings.forcerun) | (set(settings.targets) if settings.forcetargets else set())
    return {os.path.normpath(name) for name in named}


def answers_afresh(wildcards, attempt):
    """`yes` when this response shard was asked for by name: its journal is then set aside.

    A resource, because those are no provenance: having asked once makes nothing stale later. A retry keeps what the
    first attempt already answered.
    """
    shard = RESPONSES.format(**wildcards)
    asked = forced_names() & {"generate", shard, man(shard)}
    return "yes" if asked and attempt == 1 else "no"


FORCED = "EYRIE_FORCED"
os.environ.setdefault(FORCED, "")
os.environ[WORKFLOW] = str(os.getpid())  # each job ends with the Snakemake that runs it, here or on another machine


envvars:
    FORCED,


onstart:
    os.environ[FORCED] = " ".join(sorted(forced_names()))
    write_text(Path(RESOLVED), yaml.safe_dump(CONFIG.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
