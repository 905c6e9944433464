"""Real containers in a podman store that only the tests use.

The user's podman settings, images and containers are not touched. The store lies in the virtual environment, and keeps the base
image and the newest images of the project. A container is removed at the end of its test. As a program, this module builds
missing images before a test needs them.
"""

import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deadlines import scaled_s

REPOSITORY = Path(__file__).parents[2]
# The images have Debian 12's Python. The Python that runs the tests makes the wheels for the images, so it must have the same
# version.
BASE_PYTHON = (3, 11)
BUILD_TIMEOUT_S = scaled_s(800)
STEP_TIMEOUT_S = scaled_s(60)
# A container exits by itself after this time if its test was killed.
MAX_LIFE_S = 120

_CONTAINERS_CONF = """\
[containers]
# podman's own defaults are above what some machines let even root set.
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
netns = "host"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
# crun refuses machines that have both versions of cgroups.
runtime = "runc"
tmp_dir = "{store}/tmp"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{store}/storage"
runroot = "{store}/run"
"""


def why_not_here() -> str | None:
    """Why this machine cannot run containers for tests; None if it can."""
    missing = [name for name in ("podman", "runc", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "containers of tests are made by root"
    if sys.version_info[:2] != BASE_PYTHON:
        return "the base image has Python {}.{}, and wheels for it need the same here".format(*BASE_PYTHON)
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "this machine lets tests make no namespaces"
    return None


def podman_of_tests() -> "Podman":
    """Podman with the store of all test runs of this virtual environment."""
    return Podman(Path(sys.prefix) / "containers")


class Podman:
    """podman with a separate store that contains the images of this checkout."""

    def __init__(self, store: Path) -> None:
        self.folder = store
        """The store, and podman's working folder, because conmon writes a file `oom` there when a
        container is out of memory.
        """
        store.mkdir(parents=True, exist_ok=True)
        settings = {
            "CONTAINERS_CONF": (store / "containers.conf", _CONTAINERS_CONF),
            "CONTAINERS_STORAGE_CONF": (store / "storage.conf", _STORAGE_CONF),
        }
        for file, content in settings.values():
            # The file is replaced atomically, because other tests may read it.
            new = file.with_name(f"{file.name}.{os.getpid()}")
            new.write_text(content.format(store=store))
            new.replace(file)
        self.environ = {
            **os.environ,
            **{name: str(file) for name, (file, _) in settings.items()},
            "BUILDAH_LAYERS": "false",  # separate layers per line of the Dockerfile would cost time and would never be reused
            "PYTHON": sys.executable,
        }

    def run(self, *command: str, within_s: float = STEP_TIMEOUT_S, **environ: str) -> str:
        """The output of the command; an error fails the test."""
        result = subprocess.run(
            command,
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
        )
        assert result.returncode == 0, (
            f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
        )
        return result.stdout

    def image(self, kind: str) -> str:
        """The tag of the keeper's or the manager's image, built from this checkout unless it exists."""
        sources = [
            REPOSITORY / "images" / "build.sh",
            REPOSITORY / "images" / kind / "Dockerfile",
            REPOSITORY / "images" / "requirements" / f"{kind}.txt",
            *(REPOSITORY / name for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE")),
            *(
                path
                for folder in ("nni_sdk", "trial_keeper", "manager", "docs")
                for path in sorted((REPOSITORY / folder).rglob("*"))
                if path.is_file() and "__pycache__" not in path.parts
            ),
        ]
        with self._locked():
            base = self._base()
            tag = f"localhost/trial-keeper-test-{kind}:{_digest(sources, base + sys.version)}"
            if not self._has(tag):
                build = (str(REPOSITORY / "images" / "build.sh"), kind, tag, self._by_digest(base))
                # Only the image of the keeper gets a bill of materials. A bill for the image of the manager would run the same
                # lines of the script, and take 20 s more.
                bill = {"SBOM": str(self.folder / "keeper.cdx.json")} if kind == "keeper" else {}
                self.run(*build, within_s=BUILD_TIMEOUT_S, **bill)
                self._remove_older("trial-keeper" if kind == "keeper" else f"trial-keeper-{kind}")
        return tag

    def bundle(self) -> Path:
        """The folder of an installed trial_keeper_bundle, built from this checkout unless it exists."""
        sources = [
            REPOSITORY / "images" / "keeper_bundle.py",
            REPOSITORY / "images" / "requirements" / "keeper.txt",
            *sorted((REPOSITORY / "trial_keeper").rglob("*.py")),
            *sorted((REPOSITORY / "manager/nni_manager/training_services/remote").glob("*.py")),
            REPOSITORY / "manager/nni_manager/support/leftovers.py",
        ]
        with self._locked():
            installed = self.folder / f"bundle-{_digest(sources)}"
            if not installed.is_dir():
                new = installed.with_name("bundle-new")
                shutil.rmtree(new, ignore_errors=True)
                build = (sys.executable, str(sources[0]), "--output", str(new / "wheel"))
                wheel = self.run(*build, within_s=BUILD_TIMEOUT_S).split()[-1]
                shutil.unpack_archive(wheel, new, "zip")
                shutil.rmtree(new / "wheel")
                for older in self.folder.glob("bundle-????????????????"):
                    shutil.rmtree(older)
                new.rename(installed)
        return installed

    def without_python(self) -> str:
        """The tag of the base image without any Python."""
        with self._locked():
            base = self._base("tar", "gzip")
            tag = base.replace("test-base-tar-gzip", "test-without-python")
            if not self._has(tag):
                lines = f"FROM {base}\nRUN rm -rf /usr/bin/python3* /usr/lib/python3* && rm -rf /tmp/*\n"
                (self.folder / "Dockerfile").write_text(lines)
                file = ("--file", str(self.folder / "Dockerfile"))
                self.run(
                    "podman", "build", *file, "--tag", tag, str(self.folder / "run"), within_s=BUILD_TIMEOUT_S
                )
        return tag

    def _by_digest(self, tag: str) -> str:
        digest = self.run("podman", "image", "inspect", "--format", "{{.Digest}}", tag).strip()
        return f"{tag.rpartition(':')[0]}@{digest}"

    def base(self) -> str:
        """The tag of the base image, built from Debian's packages unless it exists."""
        with self._locked():
            return self._base()

    def with_mpi(self) -> str:
        """The tag of the base image with sshd and Open MPI, built unless it exists."""
        with self._locked():
            return self._base("openssh-server", "openssh-client", "openmpi-bin")

    def _base(self, *packages: str) -> str:
        script = REPOSITORY / "images" / "test-base.sh"
        kind = "-".join(["base", *packages])
        tag = f"localhost/trial-keeper-test-{kind}:{_digest([script])}"
        if not self._has(tag):
            tar_file = self.folder / f"{kind}.tar"
            self.run(str(script), str(tar_file), *packages, within_s=BUILD_TIMEOUT_S)
            # The base image has the settings of python:3.11-slim: the keeper's image must inherit PATH and must not inherit the
            # command.
            like_python = ("--change", "CMD python3", "--change", f"ENV PATH={os.defpath}:/usr/sbin:/sbin")
            self.run("podman", "import", "--quiet", *like_python, str(tar_file), tag)
            tar_file.unlink()
        return tag

    def _remove_older(self, title: str) -> None:
        """Remove images older than an hour, which no other current test run uses."""
        which = ("--filter", "until=1h", "--filter", f"label=org.opencontainers.image.title={title}")
        self.run("podman", "image", "prune", "--all", "--force", *which)

    def _has(self, tag: str) -> bool:
        exists = ["podman", "image", "exists", tag]
        return subprocess.run(exists, env=self.environ, timeout=STEP_TIMEOUT_S).returncode == 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the store, so that concurrent test runs build an image only once."""
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _digest(files: list[Path], also: str = "") -> str:
    digest = hashlib.sha256(also.encode())
    for file in files:
        content = file.read_bytes()
        digest.update(f"\0{file.relative_to(REPOSITORY)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


class Container:
    """One `podman run`, from its start to its end."""

    def __init__(self, podman: Podman, folder: Path, *arguments: str) -> None:
        """`arguments` are options of `podman run`, the image and the command; its output goes to files in `folder`."""
        self.name = f"trial-keeper-test-{secrets.token_hex(4)}"
        self._podman = podman
        self._stdout, self._stderr = folder / f"{self.name}-stdout", folder / f"{self.name}-stderr"
        options = ("--rm", "--pull", "never", "--name", self.name, "--timeout", str(MAX_LIFE_S))
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(
                ["podman", "run", *options, *arguments],
                env=podman.environ,
                cwd=podman.folder,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
            )

    def wait(self) -> int:
        """Wait for the end; return the exit code."""
        return self._process.wait(STEP_TIMEOUT_S)

    @property
    def stdout(self) -> str:
        """The standard output."""
        return self._stdout.read_text()

    @property
    def stderr(self) -> str:
        """The standard error."""
        return self._stderr.read_text()

    @property
    def pid(self) -> int:
        """The pid, on this machine, of the container's first process."""
        return int(self._podman.run("podman", "inspect", "--format", "{{.State.Pid}}", self.name))

    def stop(self, grace_s: int) -> None:
        """Send SIGTERM to the container's first process. After `grace_s`, send SIGKILL to all processes of the container."""
        self._podman.run("podman", "stop", "--time", str(grace_s), self.name)

    def signal(self, name: str) -> None:
        """Send a signal to the container's first process."""
        self._podman.run("podman", "kill", "--signal", name, self.name)

    def remove(self) -> None:
        """Remove the container."""
        self._podman.run("podman", "rm", "--force", "--ignore", "--time", "0", self.name)
        self.wait()


if __name__ == "__main__":
    reason = why_not_here()
    if reason is not None:
        print(f"no images are built: {reason}")
    else:
        for kind in ("keeper", "manager"):
            print(podman_of_tests().image(kind), flush=True)
        print(podman_of_tests().with_mpi(), flush=True)
        print(podman_of_tests().without_python(), flush=True)
        print(podman_of_tests().bundle())
