"""Builds the fake NVIDIA library of nvml_driver.c, for GPU tests on machines without GPUs."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
from deadlines import DEADLINE_S


def build_driver(folder: Path) -> dict[str, str]:
    """The environment in which a new process finds two GPUs; skips the test if the library cannot be
    built.
    """
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc, to build the stand-in for the NVIDIA driver's library")
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("needs nvidia-ml-py (the extra gpu)")
    source = Path(__file__).with_suffix(".c")
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=DEADLINE_S)
    return {"LD_LIBRARY_PATH": str(folder), "TEST_GPUS": "40:1024 80:2048"}
