"""The drafter in the layout that SGLang loads.

INPUTS
    results/<run>/drafters/<dr>/*, results/<run>/target.json
OUTPUTS
    results/<run>/export/<dr>/sglang/{model.safetensors,config.json}   and the manifest of the weights
"""


rule export:
    input:
        manifest=man(f"{DRAFTER}/model.safetensors"),
        data=ancient([f"{DRAFTER}/model.safetensors", f"{DRAFTER}/config.json"]),
        target=CARD,
    output:
        weights=f"{EXPORT}/model.safetensors",
        manifest=man(f"{EXPORT}/model.safetensors"),
        config=f"{EXPORT}/config.json",
    log:
        f"{LOGS}/export/{{drafter}}.log",
    benchmark:
        f"{TIMES}/export/{{drafter}}.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=3000,
        runtime=60,
        scripts=SCRIPTS,
        run_dir=RUN,
    params:
        recipe=recipe_for("export"),
    message:
        "Exporting drafter {wildcards.drafter} for SGLang (log: {log})"
    shell:
        "python {resources.scripts}/export_drafter.py --recipe {params.recipe:q}"
        " --drafter {resources.run_dir}/drafters/{wildcards.drafter} --target {input.target}"
        " --out {resources.run_dir}/export/{wildcards.drafter}/sglang > {log} 2>&1"
