"""NumPy and SciPy with one thread for linear algebra. The manager imports this module before anything that imports NumPy.

By default OpenBLAS starts a thread for each core. The matrices of a tuner are small: its threads mostly wait for each other in
busy loops, on cores that trials need. OpenBLAS reads its setting once, when it is loaded. Trials and users' own tuners inherit
the original environment, and a setting of the user applies to the manager too.
"""

import contextlib
import os
from collections.abc import Iterator

_SETTING = "OPENBLAS_NUM_THREADS"


@contextlib.contextmanager
def one_blas_thread() -> Iterator[None]:
    """Libraries that are loaded within the block compute in one thread, unless the user has set OPENBLAS_NUM_THREADS."""
    if _SETTING in os.environ:
        yield
        return
    os.environ[_SETTING] = "1"
    try:
        yield
    finally:
        del os.environ[_SETTING]


with one_blas_thread():
    import numpy  # noqa: F401
