# Two doors. Each does all of its own set-up; everything else is snakemake itself (.venv/bin/snakemake --help).
PYTHON ?= python3
READY := .venv/ready-$(shell cat envs/host.txt envs/prompts.txt pyproject.toml | cksum | cut -d' ' -f1)

.PHONY: report test

report: $(READY) ## run the default config and print where its report lies
	.venv/bin/snakemake
	@echo "$(CURDIR)/results/smollm2-135m/report.html"

test: $(READY) ## linters, type checker and the whole test suite
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/snakefmt --check Snakefile rules
	.venv/bin/snakemake --lint
	.venv/bin/mypy
	.venv/bin/pytest

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
