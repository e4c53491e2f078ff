"""The merge: an index of rows (never a copy), the splits, and the draft vocabulary.

INPUTS
    results/<run>/tokens/<ds>/<sh>.parquet of all datasets, results/<run>/target.json, the drafter that merge.draft_vocab_from names (if any)
OUTPUTS
    results/<run>/merged/{index.parquet,vocab.safetensors,summary.json}   and their manifests
"""

MERGED_FILES = [f"{MERGED}/{name}" for name in ("index.parquet", "vocab.safetensors", "summary.json")]


rule merge:
    input:
        manifests=every(man(TOKENS), SHARDS),
        data=ancient(every(TOKENS, SHARDS)),
        target=CARD,
        model=ancient(CONVERTED),
        vocabulary=kept_vocabulary,
    output:
        data=MERGED_FILES,
        manifests=map(man, MERGED_FILES),
    log:
        f"{LOGS}/merge.log",
    benchmark:
        f"{TIMES}/merge.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=4000,
        runtime=120,
        scripts=SCRIPTS,
        run_dir=RUN,
    params:
        recipe=recipe_for("merge"),
    message:
        "Merging all token shards (log: {log})"
    shell:
        "python {resources.scripts}/merge_tokens.py --recipe {params.recipe:q} --target {input.target}"
        " --tokens {input.data} --out {resources.run_dir}/merged > {log} 2>&1"
