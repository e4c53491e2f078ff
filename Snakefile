"""Eyrie: a target model and a list of prompt datasets in, a measured EAGLE-3 drafter out."""

from snakemake.utils import min_version

min_version("9.27")


# The embedded default. A --configfile replaces it as a whole, so that no dataset of the one leaks into the other.
if not workflow.overwrite_configfiles:

    configfile: "config.yaml"


include: "rules/common.smk"
include: "rules/target.smk"
include: "rules/ingest.smk"
include: "rules/generate.smk"
include: "rules/tokenize.smk"
include: "rules/merge.smk"
include: "rules/preview.smk"
include: "rules/hidden.smk"
include: "rules/train.smk"
include: "rules/export.smk"
include: "rules/bench.smk"
include: "rules/serve.smk"
include: "rules/report.smk"
include: "rules/doctor.smk"


localrules:
    all,
    prompts,
    responses,
    tokens,
    states,
    drafters,
    exports,
    benchmarks,


rule all:
    default_target: True
    input:
        REPORT,
        STATUS,


rule prompts:
    input:
        every(PROMPTS, SHARDS),


rule responses:
    input:
        every(RESPONSES, ANSWERED),


rule tokens:
    input:
        every(TOKENS, SHARDS),


rule states:
    input:
        every(HIDDEN, SHARDS),


rule drafters:
    input:
        expand(f"{DRAFTER}/model.safetensors", drafter=CONFIG.drafters),


rule exports:
    input:
        expand(f"{EXPORT}/model.safetensors", drafter=CONFIG.drafters),


rule benchmarks:
    input:
        expand(BENCH, drafter=CONFIG.drafters, suite=CONFIG.bench.suites),
