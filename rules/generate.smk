"""Responses: the target answers one prompt shard up to its token budget.

Every answer is journaled in results/<run>/journal/<ds>/<sh>.jsonl, which is no output: Snakemake never deletes it, and
a rerun for whatever reason reuses it. Only a shard asked for by name (-R, -f, --forcerun generate) is answered afresh.

INPUTS
    data/prompts/<ds>/<sh>.jsonl.zst, results/<run>/target.json, the model
OUTPUTS
    results/<run>/responses/<ds>/<sh>.jsonl.zst   and its manifest
"""


rule generate:
    input:
        manifest=man(PROMPTS),
        data=ancient(PROMPTS),
        target=CARD,
        model=ancient(CONVERTED),
    output:
        data=RESPONSES,
        manifest=man(RESPONSES),
    log:
        f"{LOGS}/generate/{{dataset}}/{{shard}}.log",
    benchmark:
        f"{TIMES}/generate/{{dataset}}/{{shard}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        llm_slots=1,
        mem_mb=3000,
        runtime=720,
        afresh=answers_afresh,
        scripts=SCRIPTS,
        run_dir=RUN,
        model=MODEL,
        config=RESOLVED,
        servers=f"{LOGS}/servers",
    params:
        recipe=recipe_for("generate"),
    message:
        "Answering {wildcards.dataset}/{wildcards.shard} (afresh: {resources.afresh}, log: {log})"
    shell:
        "python {resources.scripts}/generate_responses.py --recipe {params.recipe:q} --prompts {input.data}"
        " --target {input.target} --model {resources.model:q} --out {output.data}"
        " --journal {resources.run_dir}/journal/{wildcards.dataset}/{wildcards.shard}.jsonl --afresh {resources.afresh}"
        " --config {resources.config} --servers {resources.servers:q} --threads {threads} > {log} 2>&1"
