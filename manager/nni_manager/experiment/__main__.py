"""Runs a Python script that was written for NNI; its `nni.experiment` is this package.

python -m nni_manager.experiment SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from nni_sdk.aliases import install_import_aliases


def main() -> None:
    """Run the script like `python SCRIPT`."""
    parser = argparse.ArgumentParser(
        prog="python -m nni_manager.experiment",
        description="Run a Python script that was written for NNI. Its imports of nni.experiment use trial-keeper.",
    )
    parser.add_argument("script", metavar="SCRIPT", type=Path)
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    if not given.script.is_file():
        parser.error(f"cannot run {given.script}: the file does not exist; check the path")
    install_import_aliases(experiment_is_ours=True)
    sys.argv = [str(given.script), *given.arguments]
    sys.path[0] = str(given.script.resolve().parent)
    runpy.run_path(str(given.script), run_name="__main__")


if __name__ == "__main__":
    main()
