"""One drafter: trained on the merged index over all hidden shards.

Resumable checkpoints stand in results/<run>/checkpoints/<dr>/, which is no output.

INPUTS
    results/<run>/merged/*, all token and hidden shards, results/<run>/target.json, the model
OUTPUTS
    results/<run>/drafters/<dr>/{model.safetensors,config.json,metrics.parquet}   and the manifest of the weights
"""


rule train:
    input:
        merged_manifests=map(man, MERGED_FILES),
        merged=ancient(MERGED_FILES),
        token_manifests=every(man(TOKENS), SHARDS),
        tokens=ancient(every(TOKENS, SHARDS)),
        hidden_manifests=every(man(HIDDEN), SHARDS),
        hidden=ancient(every(HIDDEN, SHARDS)),
        target=CARD,
        model=ancient(CONVERTED),
    output:
        weights=f"{DRAFTER}/model.safetensors",
        manifest=man(f"{DRAFTER}/model.safetensors"),
        config=f"{DRAFTER}/config.json",
        metrics=f"{DRAFTER}/metrics.parquet",
    log:
        f"{LOGS}/train/{{drafter}}.log",
    benchmark:
        f"{TIMES}/train/{{drafter}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 2
    resources:
        llm_slots=1,
        mem_mb=5000,
        runtime=1440,
        scripts=SCRIPTS,
        run_dir=RUN,
        model=MODEL,
        device=CONFIG.engine.device,
        checkpoint_every=checkpoint_every,
    params:
        recipe=recipe_for("train"),
    message:
        "Training drafter {wildcards.drafter} (log: {log})"
    shell:
        "python {resources.scripts}/train_drafter.py --recipe {params.recipe:q}"
        " --merged {resources.run_dir}/merged --tokens {input.tokens} --hidden {input.hidden}"
        " --target {input.target} --model {resources.model:q} --out {resources.run_dir}/drafters/{wildcards.drafter}"
        " --checkpoints {resources.run_dir}/checkpoints/{wildcards.drafter}"
        " --checkpoint-every {resources.checkpoint_every}"
        " --device {resources.device:q} --threads {threads} > {log} 2>&1"
