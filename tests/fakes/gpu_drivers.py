"""Builds fake libraries of NVIDIA's and AMD's drivers, for GPU tests on machines without GPUs. The clients are the real ones."""

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from deadlines import DEADLINE_S

NVIDIA, AMD = "nvidia", "amd"
BINDINGS = {NVIDIA: "pynvml", AMD: "amdsmi"}
LIBRARIES = {NVIDIA: "libnvidia-ml.so.1", AMD: "libamd_smi.so"}
_BOUND = re.compile(r"_libraries\['libamd_smi\.so'\]\.(\w+)")


def build_driver(folder: Path, vendor: str = NVIDIA) -> dict[str, str]:
    """The environment in which a new process finds two GPUs; skips the test if the library cannot be built."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs gcc, to build the fake library of a GPU driver")
    binding = importlib.util.find_spec(BINDINGS[vendor])
    if binding is None:
        pytest.skip(f"needs {BINDINGS[vendor]} (the extra gpu)")
    source = Path(__file__).with_name(f"{vendor}_driver.c")
    options = []
    if vendor == AMD:
        # When amdsmi is imported, it looks up every function of its library. So the fake library must also define the functions
        # that the tests do not use.
        wrapper = Path(binding.origin).with_name("amdsmi_wrapper.py").read_text()
        written = source.read_text()
        others = sorted(name for name in set(_BOUND.findall(wrapper)) if f" {name}(" not in written)
        header = folder / "others.h"
        header.write_text("".join(f"int {name}(void) {{ return NOT_SUPPORTED; }}\n" for name in others))
        options = ["-I", str(folder)]
    subprocess.run(
        [compiler, "-shared", "-fPIC", *options, "-o", folder / LIBRARIES[vendor], source],
        check=True,
        timeout=DEADLINE_S,
    )
    return {"LD_LIBRARY_PATH": str(folder), "TEST_GPUS": "40:1024 80:2048"}
