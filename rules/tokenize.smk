"""Token rows: ids and supervised spans, one row per assistant turn.

INPUTS
    results/<run>/responses/<ds>/<sh>.jsonl.zst (answered) or data/prompts/<ds>/<sh>.jsonl.zst (native)
    results/<run>/target.json, the tokenizer of the model
OUTPUTS
    results/<run>/tokens/<ds>/<sh>.parquet   and its manifest
"""


rule tokenize:
    input:
        manifest=rows_source_manifest,
        data=ancient(rows_source),
        target=CARD,
        model=ancient(CONVERTED),
    output:
        data=TOKENS,
        manifest=man(TOKENS),
    log:
        f"{LOGS}/tokenize/{{dataset}}/{{shard}}.log",
    benchmark:
        f"{TIMES}/tokenize/{{dataset}}/{{shard}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
        scripts=SCRIPTS,
        model=MODEL,
    params:
        recipe=recipe_for("tokenize"),
    message:
        "Tokenizing {wildcards.dataset}/{wildcards.shard} (log: {log})"
    shell:
        "python {resources.scripts}/tokenize_rows.py --recipe {params.recipe:q} --source {input.data}"
        " --name {wildcards.dataset} --target {input.target} --model {resources.model:q}"
        " --out {output.data} > {log} 2>&1"
