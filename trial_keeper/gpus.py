"""The GPUs of this machine or container, through the libraries of their drivers: NVIDIA's NVML, or AMD's SMI."""

from __future__ import annotations

import contextlib
import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from trial_keeper.errors import KeeperUserError
from trial_keeper.wire.messages import GpuUsage

_NVIDIA_LIBRARY = "libnvidia-ml.so.1"
# Where ROCm installs it, if the linker does not find it.
_AMD_LIBRARIES = ("libamd_smi.so", "/opt/rocm/lib/libamd_smi.so")


class GpusUnseen(KeeperUserError):
    """The driver shows no GPU here."""


class BindingMissing(GpusUnseen):
    """The driver is installed, but the Python package that queries it is not."""


class Gpus(ABC):
    """Queries a driver. GPUs have its order."""

    def __init__(self, handles: Sequence[Any], error: type[Exception]) -> None:
        """`error`: what a call raises if a GPU does not respond."""
        self._handles, self._error = handles, error

    def __len__(self) -> int:
        return len(self._handles)

    def names(self) -> list[str]:
        """Return the product name of each GPU, in the order of their indices."""
        names = []
        for handle in self._handles:
            try:
                names.append(self._name(handle))
            except self._error as error:
                names.append(f"a GPU with the error {str(error)!r}")
        return names

    def in_use(self) -> frozenset[int]:
        """Return the indices of the GPUs on which any process computes. A GPU that does not respond is left out."""
        found = set()
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(self._error):
                if self._is_in_use(handle):
                    found.add(index)
        return frozenset(found)

    def usage(self, indices: tuple[int, ...] | None) -> tuple[GpuUsage, ...]:
        """Return the current usage of these GPUs, or of all for None. A GPU that does not respond is omitted."""
        usages = []
        for index, handle in enumerate(self._handles):
            if indices is None or index in indices:
                with contextlib.suppress(self._error):
                    usages.append(GpuUsage(index, *self._usage(handle)))
        return tuple(usages)

    @abstractmethod
    def _name(self, handle: Any) -> str: ...

    @abstractmethod
    def _is_in_use(self, handle: Any) -> bool: ...

    @abstractmethod
    def _usage(self, handle: Any) -> tuple[float, int]:
        """Return the load in percent and the used memory in bytes."""


class _NvidiaGpus(Gpus):
    def __init__(self, nvml: Any) -> None:
        nvml.nvmlInit()
        self._nvml = nvml
        indices = range(nvml.nvmlDeviceGetCount())
        super().__init__([nvml.nvmlDeviceGetHandleByIndex(index) for index in indices], nvml.NVMLError)

    def _name(self, handle: Any) -> str:
        return str(self._nvml.nvmlDeviceGetName(handle))

    def _is_in_use(self, handle: Any) -> bool:
        return bool(self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))

    def _usage(self, handle: Any) -> tuple[float, int]:
        utilisation = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return float(utilisation), int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)


class _AmdGpus(Gpus):
    def __init__(self, smi: Any) -> None:
        smi.amdsmi_init()
        self._smi = smi
        super().__init__(smi.amdsmi_get_processor_handles(), smi.AmdSmiException)

    def _name(self, handle: Any) -> str:
        return str(self._smi.amdsmi_get_gpu_asic_info(handle)["market_name"])

    def _is_in_use(self, handle: Any) -> bool:
        return bool(self._smi.amdsmi_get_gpu_process_list(handle))

    def _usage(self, handle: Any) -> tuple[float, int]:
        load = self._smi.amdsmi_get_gpu_activity(handle)["gfx_activity"]
        used = self._smi.amdsmi_get_gpu_memory_usage(handle, self._smi.AmdSmiMemoryType.VRAM)
        # Some GPUs report no load: `N/A`.
        return float(load) if isinstance(load, int) else 0.0, int(used)


def gpus_here() -> Gpus:
    """Load the library of the driver, NVIDIA's if there are both, and list the GPUs.

    Raises:
        GpusUnseen: this container has no driver, or the driver does not work.
        BindingMissing: nvidia-ml-py or amdsmi is not installed, or amdsmi is of another version than the driver.
    """
    # Before an import: a machine without GPUs saves its 40 ms and some MB.
    if _is_loadable(_NVIDIA_LIBRARY):
        return _nvidia_gpus()
    if any(map(_is_loadable, _AMD_LIBRARIES)):
        return _amd_gpus()
    raise GpusUnseen(
        f"cannot list GPUs: there is neither {_NVIDIA_LIBRARY} nor {_AMD_LIBRARIES[0]} in this container; "
        "start the container with the runtime of NVIDIA or AMD if the machine has GPUs"
    )


def _is_loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _nvidia_gpus() -> Gpus:
    try:
        import pynvml  # of nvidia-ml-py, an optional extra
    except ImportError as error:
        raise BindingMissing(
            "cannot list GPUs: nvidia-ml-py is not installed; run pip install 'trial-keeper[gpu]' in the keeper's environment"
        ) from error
    try:
        return _NvidiaGpus(pynvml)
    except pynvml.NVMLError as error:
        raise _unusable(error, "nvidia-smi") from error


def _amd_gpus() -> Gpus:
    try:
        import amdsmi  # an optional extra, or of ROCm: /opt/rocm/share/amd_smi
    except (ImportError, AttributeError, KeyError) as error:  # the last two: the library lacks a function
        raise BindingMissing(
            "cannot list GPUs: amdsmi is not installed, or is of another version than ROCm; run pip install "
            "/opt/rocm/share/amd_smi or pip install 'amdsmi==X.Y.*' for ROCm X.Y in the keeper's environment"
        ) from error
    try:
        return _AmdGpus(amdsmi)
    except amdsmi.AmdSmiException as error:
        raise _unusable(error, "amd-smi") from error


def _unusable(error: Exception, program: str) -> GpusUnseen:
    return GpusUnseen(
        f"cannot list GPUs: the driver reports {str(error)!r}; "
        f"check that {program} works in this container and on its machine"
    )
