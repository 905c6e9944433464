"""A search by an optimiser of another project, in a process of its virtual environment; see `peer_tuners`."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from nni_manager.config import search_space
from nni_manager.config.search_space import SearchSpace

_HERE = Path(__file__).parent
INSTALLED = _HERE.parents[1] / ".venv/peers"
PEERS = {
    "HEBO": "hebo",
    "SMAC3": "smac3",
    "Vizier": "vizier",
    "Ax": "ax",
    "Nevergrad": "nevergrad",
    "Optuna's GPSampler": "optuna-gp",
    "scikit-optimize": "scikit-optimize",
}
"""The folder of each peer's virtual environment."""
_DISTRIBUTIONS = {
    "HEBO": "HEBO",
    "SMAC3": "smac",
    "Vizier": "google-vizier",
    "Ax": "ax-platform",
    "Nevergrad": "nevergrad",
    "Optuna's GPSampler": "optuna",
    "scikit-optimize": "scikit-optimize",
}


class PeerFailed(Exception):
    """The process of a peer has ended; the message is the last line of its stderr."""


def is_installed(peer: str) -> bool:
    """True if `make quality-peers` has installed the peer."""
    return (INSTALLED / PEERS[peer] / ".installed").exists()


def version_of(peer: str) -> str | None:
    """The version in the peer's virtual environment; None if its package is not there."""
    folders = (INSTALLED / PEERS[peer]).glob("lib/python*/site-packages")
    found = metadata.distributions(name=_DISTRIBUTIONS[peer], path=[str(each) for each in folders])
    return next((each.version for each in found), None)


def dimensions_of(space: SearchSpace) -> list[dict[str, Any]]:
    """The dimensions of a search space, as a peer receives them. A parameter that occurs in several options becomes one
    dimension, as in a typical user's code.
    """
    found: dict[str, dict[str, Any]] = {}
    for each in _dimensions(space, "", ()):
        known = found.setdefault(each["name"], each)
        if known is not each:
            known["parents"] += each["parents"]
            known |= {"low": min(known["low"], each["low"]), "high": max(known["high"], each["high"])}
    return list(found.values())


def _dimensions(
    space: SearchSpace, above: str, parents: tuple[tuple[str, int], ...]
) -> Iterator[dict[str, Any]]:
    for name, each in space.parameters.items():
        column = f"{above}{name}"
        made: dict[str, Any] = {"name": column, "kind": "float", "is_log": False, "parents": [*parents]}
        match each:
            case search_space.Choice(options):
                yield made | {"kind": "choice", "count": len(options), "low": 0, "high": len(options) - 1}
                for number, option in enumerate(options):
                    if isinstance(option, search_space.Nested):
                        yield from _dimensions(option.space, f"{column}.", ((column, number),))
            case search_space.RandInt(low, high):
                yield made | {"kind": "int", "low": low, "high": high - 1}
            case search_space.Uniform(low, high) | search_space.QUniform(low, high):
                yield made | {"low": low, "high": high}
            case search_space.LogUniform(low, high) | search_space.QLogUniform(low, high):
                yield made | {"low": low, "high": high, "is_log": True}
            case _:
                raise NotImplementedError(f"cannot describe {column} to a peer: {each}")


class Suggested:
    """A peer's draws, with the interface of an Optuna trial."""

    def __init__(self, draws: dict[str, Any]) -> None:
        """`draws` maps dimensions to values. Inactive dimensions may be absent."""
        self._draws = draws

    def suggest_categorical(self, name: str, _: range) -> int:
        """The index of an option."""
        return int(self._draws[name])

    def suggest_int(self, name: str, low: int, high: int) -> int:
        """The draw, within the bounds."""
        return min(max(round(self._draws[name]), low), high)

    def suggest_float(self, name: str, low: float, high: float, **_: Any) -> float:
        """The draw, within the bounds."""
        return min(max(float(self._draws[name]), low), high)


class PeerProcess:
    """One search with a peer. The caller alternates between `ask` and `tell`."""

    def __init__(self, peer: str, space: SearchSpace, seed: int) -> None:
        """Start its process."""
        self._dimensions = dimensions_of(space)
        python = INSTALLED / PEERS[peer] / "bin/python"
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        # JAX caches compiled functions in this folder, because all searches of a problem compile the same functions.
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(INSTALLED / PEERS[peer] / "jax-cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        cpu = cache | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [str(python), str(_HERE / "peer_tuners.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=os.environ | single | cpu,
        )
        self._peer, self.cpu_s = peer, 0.0
        try:
            self._write({"peer": PEERS[peer], "seed": seed, "dimensions": self._dimensions})
        except PeerFailed:
            self.close()
            raise

    def ask(self) -> Suggested:
        """The next proposal.

        Raises:
            PeerFailed: the process has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._failure()
        answer = json.loads(line)
        self.cpu_s = answer["cpu_s"]
        return Suggested(answer["draws"])

    def tell(self, value: float | None) -> None:
        """Report the result of the last proposal; None if the trial failed."""
        self._write(value)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def _write(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure() from error

    def _failure(self) -> PeerFailed:
        self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return PeerFailed(f"{self._peer}: {lines[-1] if lines else 'its process has ended'}")
