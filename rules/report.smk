"""The report for people and STATUS.md, the engineering record.

INPUTS
    manifests and figures of every stage; results/<run>/config.resolved.yaml (written when the run starts)
OUTPUTS
    results/<run>/report.html, results/<run>/STATUS.md
"""


rule report:
    input:
        prompts=every(man(PROMPTS), SHARDS),
        responses=every(man(RESPONSES), ANSWERED),
        tokens=every(man(TOKENS), SHARDS),
        merged_manifests=map(man, MERGED_FILES),
        merged=ancient(MERGED_FILES),
        hidden=every(man(HIDDEN), SHARDS),
        drafters=expand(man(f"{DRAFTER}/model.safetensors"), drafter=CONFIG.drafters),
        metrics=ancient(expand(f"{DRAFTER}/metrics.parquet", drafter=CONFIG.drafters)),
        exports=expand(man(f"{EXPORT}/model.safetensors"), drafter=CONFIG.drafters),
        bench=expand(BENCH, drafter=CONFIG.drafters, suite=CONFIG.bench.suites),
        target=CARD,
    output:
        html=REPORT,
        status=STATUS,
    log:
        f"{LOGS}/report.log",
    benchmark:
        f"{TIMES}/report.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=30,
        scripts=SCRIPTS,
        run_dir=RUN,
    params:
        recipe=recipe_for("report"),
    message:
        "Writing {output.html} (log: {log})"
    shell:
        "python {resources.scripts}/write_report.py --config {resources.run_dir}/config.resolved.yaml"
        " --run-dir {resources.run_dir} --out {output.html}"
        " --status {output.status} > {log} 2>&1"
