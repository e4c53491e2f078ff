"""The exported drafter on a real engine: SGLang with and without it, against the reference decoder.

INPUTS
    results/<run>/export/<dr>/sglang/*, results/<run>/merged/*, all token shards, results/<run>/target.json, the model
OUTPUTS
    results/<run>/serve/<dr>.json
"""


rule serve:
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
        SERVE,
    log:
        f"{LOGS}/serve/{{drafter}}.log",
    benchmark:
        f"{TIMES}/serve/{{drafter}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 2
    resources:
        llm_slots=1,
        mem_mb=9000,
        runtime=720,
        scripts=SCRIPTS,
        run_dir=RUN,
        model=MODEL,
        machine=canonical_json(machine_options(CONFIG.server)),
        servers=f"{LOGS}/servers",
    params:
        recipe=recipe_for("serve"),
    message:
        "Serving {wildcards.drafter} with SGLang (log: {log})"
    shell:
        "python {resources.scripts}/serve_drafter.py --recipe {params.recipe:q} --machine {resources.machine:q}"
        " --export {resources.run_dir}/export/{wildcards.drafter}/sglang"
        " --target {input.target} --model {resources.model:q}"
        " --merged {resources.run_dir}/merged --tokens {input.tokens} --servers {resources.servers:q} --out {output}"
        " --threads {threads} > {log} 2>&1"
