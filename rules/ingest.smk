"""Prompts: one fixed slice of a dataset's deduplicated stream.

INPUTS
    the raw source: package data, a hub dataset, or the file `datasets.<ds>.path`
OUTPUTS
    data/prompts/<ds>/<sh>.jsonl.zst   and its manifest; rejected rows beside it in <sh>.rejects.jsonl.zst
"""


rule ingest:
    input:
        raw=raw_source,
    output:
        data=PROMPTS,
        manifest=man(PROMPTS),
    log:
        f"{LOGS}/ingest/{{dataset}}/{{shard}}.log",
    benchmark:
        f"{TIMES}/ingest/{{dataset}}/{{shard}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=120,
        scripts=SCRIPTS,
    params:
        recipe=recipe_for("ingest"),
    message:
        "Ingesting prompts {wildcards.dataset}/{wildcards.shard} (log: {log})"
    shell:
        "python {resources.scripts}/ingest_prompts.py --recipe {params.recipe:q} --name {wildcards.dataset}"
        " --out {output.data} > {log} 2>&1"
