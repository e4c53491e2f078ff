# Two doors, and a third for SGLang. Each does all of its own set-up; everything else is snakemake itself
# (.venv/bin/snakemake --help).
PYTHON ?= python3
READY := .venv/ready-$(shell cat envs/host.txt envs/prompts.txt pyproject.toml | cksum | cut -d' ' -f1)
SERVE_READY := .venv-serve/ready-$(shell cat envs/serve-cpu.txt serve_cpu/pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: report test serve-cpu

report: $(READY) ## run the default config and print where its report lies
	.venv/bin/snakemake
	@echo "$(CURDIR)/results/smollm2-135m/report.html"

test: $(READY) $(SERVE_READY) ## linters, type checker and the whole test suite, with a real server
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/snakefmt --check Snakefile rules
	.venv/bin/snakemake --lint
	.venv/bin/mypy
	.venv/bin/pytest

serve-cpu: $(SERVE_READY) ## SGLang for machines without a GPU, in .venv-serve (2.5 GB)

# The environment, keyed on what it is made of: a second call is instant, a changed lock installs again.
$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Eyrie needs Python 3.11 or newer, found $$($(PYTHON) --version 2>&1); give one with make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet --requirement envs/host.txt
	.venv/bin/pip install --quiet --no-deps --requirement envs/prompts.txt
	.venv/bin/pip install --quiet --no-deps --no-build-isolation --editable .
	rm -f .venv/ready-*
	touch $@

# Every package is pinned and installed as it is: what SGLang asks for beyond these would bring CUDA.
$(SERVE_READY):
	$(PYTHON) -m venv .venv-serve
	.venv-serve/bin/pip install --quiet --no-deps --requirement envs/serve-cpu.txt
	.venv-serve/bin/pip install --quiet --no-deps --no-build-isolation --editable serve_cpu
	rm -f .venv-serve/ready-*
	touch $@
