"""The preview: random rows as they are trained on, for a person to look at before training. Not part of `all`.

INPUTS
    token shards, the merged index and its figures, manifests of prompts and responses, the target's tokenizer;
    results/<run>/config.resolved.yaml (written when the run starts)
OUTPUTS
    results/<run>/preview.html
"""


rule preview:
    input:
        prompts=every(man(PROMPTS), SHARDS),
        responses=every(man(RESPONSES), ANSWERED),
        tokens=every(man(TOKENS), SHARDS),
        data=ancient(every(TOKENS, SHARDS)),
        merged_manifests=map(man, MERGED_FILES),
        merged=ancient(MERGED_FILES),
        target=CARD,
        model=ancient(CONVERTED),
    output:
        PREVIEW,
    log:
        f"{LOGS}/preview.log",
    benchmark:
        f"{TIMES}/preview.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
        scripts=SCRIPTS,
        run_dir=RUN,
        model=MODEL,
    params:
        recipe=recipe_for("preview"),
    message:
        "Writing {output} (log: {log})"
    shell:
        "python {resources.scripts}/write_preview.py --recipe {params.recipe:q}"
        " --config {resources.run_dir}/config.resolved.yaml --run-dir {resources.run_dir}"
        " --model {resources.model:q} --out {output} > {log} 2>&1"
