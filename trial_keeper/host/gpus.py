"""The NVIDIA GPUs of this container, through the driver's own library (NVML)."""

import contextlib
import ctypes
from typing import Any

from trial_keeper.errors import UserError
from trial_keeper.wire.messages import GpuUsage

_DRIVER_LIBRARY = "libnvidia-ml.so.1"


class GpusUnseen(UserError):
    """The driver shows no GPU here."""


class NvmlMissing(GpusUnseen):
    """There is a driver, and nothing installed that asks it."""


class Gpus:
    """Queries the driver."""

    def __init__(self) -> None:
        """Load the driver's library and list the GPUs.

        Raises:
            GpusUnseen: no driver in this container, or it does not work.
            NvmlMissing: nvidia-ml-py is not installed.
        """
        try:
            # Before the import, whose 40 ms and some MB a machine without GPUs saves.
            ctypes.CDLL(_DRIVER_LIBRARY)
        except OSError as error:
            raise GpusUnseen(
                f"cannot ask for GPUs: {_DRIVER_LIBRARY} is not here; "
                "start the container with NVIDIA's container runtime if the machine has GPUs"
            ) from error
        try:
            import pynvml  # of nvidia-ml-py, an optional extra
        except ImportError as error:
            raise NvmlMissing(
                "cannot ask for GPUs: nvidia-ml-py is not installed; pip install 'trial-keeper[gpu]' where the keeper is"
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
                f"cannot ask for GPUs: the driver says {str(error)!r}; "
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
                names.append(f"a GPU that says {str(error)!r}")
        return names

    def usage(self, indices: tuple[int, ...] | None) -> tuple[GpuUsage, ...]:
        """Return the current usage of these GPUs; None: all. A GPU that does not answer is omitted."""
        usages = []
        for index, handle in enumerate(self._handles):
            if indices is not None and index not in indices:
                continue
            with contextlib.suppress(self._nvml.NVMLError):
                utilisation = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                memory_used = self._nvml.nvmlDeviceGetMemoryInfo(handle).used
                usages.append(GpuUsage(index, float(utilisation), int(memory_used)))
        return tuple(usages)
