"""The benchmark: speculative against plain decoding on held-out prompts.

INPUTS
    results/<run>/export/<dr>/sglang/*, results/<run>/merged/*, all token shards, results/<run>/target.json, the model
OUTPUTS
    results/<run>/bench/<dr>/<suite>.json
"""


rule bench:
    input:
        manifest=man(f"{EXPORT}/model.safetensors"),
        data=ancient([f"{EXPORT}/model.safetensors", f"{EXPORT}/config.json"]),
        merged_manifests=map(man, MERGED_FILES),
        merged=ancient(MERGED_FILES),
        token_manifests=every(man(TOKENS), SHARDS),
        tokens=ancient(every(TOKENS, SHARDS)),
        target=CARD,
        model=ancient(CONVERTED),
    output:
        BENCH,
    log:
        f"{LOGS}/bench/{{drafter}}/{{suite}}.log",
    benchmark:
        f"{TIMES}/bench/{{drafter}}/{{suite}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 2
    resources:
        llm_slots=1,
        mem_mb=3000,
        runtime=720,
        scripts=SCRIPTS,
        run_dir=RUN,
        model=MODEL,
    params:
        recipe=recipe_for("bench"),
    message:
        "Benchmarking {wildcards.drafter} on {wildcards.suite} (log: {log})"
    shell:
        "python {resources.scripts}/bench_drafter.py --recipe {params.recipe:q} --suite {wildcards.suite}"
        " --export {resources.run_dir}/export/{wildcards.drafter}/sglang"
        " --target {input.target} --model {resources.model:q}"
        " --merged {resources.run_dir}/merged --tokens {input.tokens} --out {output}"
        " --threads {threads} > {log} 2>&1"
