"""Record which arguments an SGLang version accepts, for Eyrie to check its own against: run it once per version."""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

from eyrie.errors import EyrieError, run_cli
from eyrie.formats.publish import write_text

# Runs in SGLang's own interpreter, which knows nothing of Eyrie.
_ASK = """
import argparse, importlib.metadata, json
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
flags = {}
for action in parser._actions:
    takes = {None: 1, 0: 0, "?": "?", "*": "*", "+": "*"}.get(action.nargs, action.nargs)
    entry = {"takes": takes}
    if action.choices:
        entry["choices"] = sorted(map(str, action.choices))
    for name in action.option_strings:
        if name.startswith("--"):
            flags[name] = entry
print("RECORD" + json.dumps({"version": importlib.metadata.version("sglang"), "flags": flags}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=Path(".venv-serve/bin/python"), help="SGLang's interpreter")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).resolve().parents[1] / "eyrie" / "servers" / "flags",
        help="folder of the record",
    )
    args = parser.parse_args()

    try:
        done = subprocess.run([args.python, "-c", _ASK], capture_output=True, text=True)
    except OSError as error:
        raise EyrieError(
            f"{args.python}: cannot be run ({error.strerror}); run `make serve-cpu`, or give SGLang's interpreter with "
            "--python"
        ) from error
    record = next((line[6:] for line in done.stdout.splitlines() if line.startswith("RECORD")), None)
    if done.returncode or record is None:
        raise EyrieError(f"{args.python}: cannot list SGLang's arguments ({done.stderr.strip().splitlines()[-1:]})")
    found = json.loads(record)
    lines = [f"  {json.dumps(name)}: {json.dumps(found['flags'][name])}" for name in sorted(found["flags"])]
    head = f'{{\n "version": {json.dumps(found["version"])},\n "flags": {{\n'
    write_text(args.out / f"sglang-{found['version']}.json", head + ",\n".join(lines) + "\n }\n}\n")
    print(f"{len(lines)} arguments of SGLang {found['version']}")


if __name__ == "__main__":
    run_cli(main)
