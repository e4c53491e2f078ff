"""The doctor: machine, config and run examined now. Not part of `all`; whenever it is asked for, it looks again.

INPUTS
    none that is waited for: the machine, and whatever the run has made so far
OUTPUTS
    results/<run>/doctor.md, results/<run>/doctor.json
"""


rule doctor:
    output:
        page=DOCTOR,
        facts=f"{RUN}/doctor.json",
    log:
        f"{LOGS}/doctor.log",
    benchmark:
        f"{TIMES}/doctor.tsv"
    conda:
        "../envs/host.yaml"
    threads: 1
    resources:
        mem_mb=2000,
        runtime=10,
        scripts=SCRIPTS,
        run_dir=RUN,
        servers=f"{LOGS}/servers",
        config=RESOLVED,
    params:
        recipe=asked_now,
    message:
        "Examining this machine for {output.page} (log: {log})"
    shell:
        "python {resources.scripts}/doctor.py --config {resources.config} --run-dir {resources.run_dir}"
        " --servers {resources.servers:q} --out {output.page} > {log} 2>&1"
