"""The target model: a Hugging Face folder, and a card that says what it is.

INPUTS
    nothing (a GGUF inside an installed package), or the files of the local folder `target.model`
OUTPUTS
    <target.model>/*            only with `target.gguf`: config, weights, tokenizer, template, and a manifest
    results/<run>/target.json   hashes of weights, tokenizer and template; sizes; stop ids
"""

if CONFIG.target.gguf:

    rule convert_target:
        output:
            files=CONVERTED,
            manifest=man(f"{MODEL}/model.safetensors"),
        log:
            f"{LOGS}/convert_target.log",
        benchmark:
            f"{TIMES}/convert_target.tsv"
        conda:
            "../envs/host.yaml"
        threads: 1
        resources:
            mem_mb=4000,
            runtime=60,
            scripts=SCRIPTS,
            model=MODEL,
        params:
            recipe=recipe_for("convert"),
        message:
            "Converting the target to {resources.model} (log: {log})"
        shell:
            "python {resources.scripts}/convert_target.py --recipe {params.recipe:q}"
            " --out {resources.model:q} > {log} 2>&1"


rule identify_target:
    input:
        files=identity_files(),
        manifest=man(f"{MODEL}/model.safetensors") if CONVERTED else [],
        weights=ancient(CONVERTED[-1:]),
    output:
        CARD,
    log:
        f"{LOGS}/identify_target.log",
    benchmark:
        f"{TIMES}/identify_target.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=60,
        scripts=SCRIPTS,
        model=MODEL,
    params:
        recipe=recipe_for("target"),
    message:
        "Identifying the target {resources.model} (log: {log})"
    shell:
        "python {resources.scripts}/identify_target.py --recipe {params.recipe:q}"
        " --model {resources.model:q} --out {output} > {log} 2>&1"
