"""Every option of Eyrie: its type, default, unit and check.

This package is the only list of options. The JSON schema (``config/schema.json``) and ``docs/config.md`` are generated
from it (:mod:`eyrie.config.reference`). Fields marked ``machine=True`` say where or how fast work runs, never what it
computes, and so never enter a recipe (:mod:`eyrie.recipes`): changing one rebuilds nothing.

``sources``    the target and the datasets
``engines``    who answers
``stages``     everything below the answers
``checks``     names of the checks that ``doctor.allow`` may overrule
``files``      YAML in which no key stands twice
``whole``      all of it, and how a file becomes it
"""

from eyrie.config.engines import ENGINE_FITS, ENGINE_NEEDS, Engine, OpenRouter, Server
from eyrie.config.files import read_options
from eyrie.config.section import Section, section_of
from eyrie.config.sources import Dataset, Gates, GgufSource, Sampling, Target
from eyrie.config.stages import Bench, Doctor, Drafter, Hidden, Merge, Suite, Tokenize
from eyrie.config.whole import Config, load_config, parse_config

__all__ = [
    "ENGINE_FITS", "ENGINE_NEEDS", "Bench", "Config", "Dataset", "Doctor", "Drafter", "Engine", "Gates", "GgufSource",
    "Hidden", "Merge", "OpenRouter", "Sampling", "Section", "Server", "Suite", "Target", "Tokenize",
    "load_config", "parse_config", "read_options", "section_of",
]  # fmt: skip
