"""Hidden states of the target over one token shard.

INPUTS
    results/<run>/tokens/<ds>/<sh>.parquet, results/<run>/target.json, the model
OUTPUTS
    results/<run>/hidden/<ds>/<sh>.safetensors   and its manifest
"""


rule hidden:
    input:
        manifest=man(TOKENS),
        data=ancient(TOKENS),
        target=CARD,
        model=ancient(CONVERTED),
    output:
        data=HIDDEN,
        manifest=man(HIDDEN),
    log:
        f"{LOGS}/hidden/{{dataset}}/{{shard}}.log",
    benchmark:
        f"{TIMES}/hidden/{{dataset}}/{{shard}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        llm_slots=1,
        mem_mb=3000,
        runtime=720,
        scripts=SCRIPTS,
        model=MODEL,
        device=CONFIG.engine.device,
        batch_tokens=CONFIG.hidden.batch_tokens,
    params:
        recipe=recipe_for("hidden"),
    message:
        "Capturing hidden states {wildcards.dataset}/{wildcards.shard} (log: {log})"
    shell:
        "python {resources.scripts}/capture_hidden.py --recipe {params.recipe:q} --tokens {input.data}"
        " --target {input.target} --model {resources.model:q} --out {output.data}"
        " --batch-tokens {resources.batch_tokens} --device {resources.device:q}"
        " --threads {threads} > {log} 2>&1"
