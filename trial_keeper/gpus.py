"""The NVIDIA GPUs of this machine or container, through the driver's own library (NVML)."""

import contextlib
import ctypes
from typing import Any

from trial_keeper.errors import KeeperUserError
from trial_keeper.wire.messages import GpuUsage

_DRIVER_LIBRARY = "libnvidia-ml.so.1"


class GpusUnseen(KeeperUserError):
    """The driver shows no GPU here."""


class NvmlMissing(GpusUnseen):
    """The driver is installed, but the library that queries it is not."""


class Gpus:
    """Queries the driver."""

    def __init__(self) -> None:
        """Load the driver's library and list the GPUs.

        Raises:
            GpusUnseen: this container has no driver, or the driver does not work.
            NvmlMissing: nvidia-ml-py is not installed.
        """
        try:
            # Before the import: a machine without GPUs saves its 40 ms and some MB.
            ctypes.CDLL(_DRIVER_LIBRARY)
        except OSError as error:
            raise GpusUnseen(
                f"cannot list GPUs: there is no {_DRIVER_LIBRARY} in this container; "
                "start the container with NVIDIA's container runtime if the machine has GPUs"
            ) from error
        try:
            import pynvml  # of nvidia-ml-py, an optional extra
        except ImportError as error:
            raise NvmlMissing(
                "cannot list GPUs: nvidia-ml-py is not installed; run pip install 'trial-keeper[gpu]' in the keeper's environment"
            ) from error
        self._nvml: Any = pynvml
        try:
            self._nvml.nvmlInit()
            self._handles = [
                self._nvml.nvmlDeviceGetHandleByIndex(index)
                for index in range(self._nvml.nvmlDeviceGetCount())
            ]
        except self._nvml.NVMLError as error:
            raise GpusUnseen(
                f"cannot list GPUs: the driver reports {str(error)!r}; "
                "check that nvidia-smi works in this container and on its machine"
            ) from error

    def __len__(self) -> int:
        return len(self._handles)

    def names(self) -> list[str]:
        """Return the product name of each GPU, in the order of their indices."""
        names = []
        for handle in self._handles:
            try:
                names.append(str(self._nvml.nvmlDeviceGetName(handle)))
            except self._nvml.NVMLError as error:
                names.append(f"a GPU with the error {str(error)!r}")
        return names

    def in_use(self) -> frozenset[int]:
        """Return the indices of the GPUs on which any process computes. A GPU that does not respond is left out."""
        found = set()
        for index, handle in enumerate(self._handles):
            with contextlib.suppress(self._nvml.NVMLError):
                if self._nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    found.add(index)
        return frozenset(found)

    def usage(self, indices: tuple[int, ...] | None) -> tuple[GpuUsage, ...]:
        """Return the current usage of these GPUs, or of all for None. A GPU that does not respond is omitted."""
        usages = []
        for index, handle in enumerate(self._handles):
            if indices is not None and index not in indices:
                continue
            with contextlib.suppress(self._nvml.NVMLError):
                utilisation = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                memory_used = self._nvml.nvmlDeviceGetMemoryInfo(handle).used
                usages.append(GpuUsage(index, float(utilisation), int(memory_used)))
        return tuple(usages)
