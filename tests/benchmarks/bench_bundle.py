"""The cost of the keeper's bundle: its size, and the duration of a whole job, compared with a job that uses an installed
keeper.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from table import Row, render

# Modules that tests and benchmarks share, such as fake_manager, are in tests/fakes.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from deadlines import DEADLINE_S
from fake_manager import Site
from real_containers import podman_of_tests

from nni_manager.engine.shared_files import SharedFiles
from nni_manager.support.keeper_bundle import bundle_for
from nni_manager.training_services.run_script import render_run_script
from trial_keeper.wire.documents import ManagerDocument

ROUNDS = 15
MOST_MB = 100
_TOOLS = ("b2sum", "bash", "mktemp", "rm", "tar", "tee", "true", "uname")


def bundled_start() -> list[Row]:
    """Median time of a job that runs `true`, alternately with the bundle's keeper and with an installed keeper; and the size of
    the bundle.
    """
    sys.path.insert(0, str(podman_of_tests().bundle()))
    bundle = bundle_for("auto")
    assert bundle is not None
    programs = {
        "installed": {"trial-keeper": Path(sys.executable).with_name("trial-keeper")},
        "of this Python": {"python3": sys.executable},
        "frozen": {},
    }
    took_ms: dict[str, list[float]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "storage")
        site.manager.start()
        document = ManagerDocument.from_bytes(site.workspace.manager_json.read_bytes())
        SharedFiles(site.workspace).write_experiment(document, render_run_script(bundle), None, bundle)
        for name, more in programs.items():
            path = Path(folder) / name
            path.mkdir()
            for tool, target in ({tool: shutil.which(tool) for tool in _TOOLS} | more).items():
                (path / tool).symlink_to(target)
        for round_ in range(ROUNDS):
            for name in programs:
                trial_id = f"t{round_}{name[0]}"
                site.add_trial("true", trial_id=trial_id)
                settings = site.settings(trial_id=trial_id, job_id=trial_id)
                environ = {"PATH": str(Path(folder) / name), "TMPDIR": folder, **settings.to_environ()}
                begin = time.perf_counter()
                command = ("bash", str(site.workspace.run_sh))
                done = subprocess.run(
                    command, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
                )
                took_ms[name].append((time.perf_counter() - begin) * 1e3)
                if done.returncode != 0:
                    raise RuntimeError(f"{command} has ended with {done.returncode}: {done.stderr}")
        site.close()
    took = {name: median(times) for name, times in took_ms.items()}
    size_mb = sum(os.stat(bundle.archive(name)).st_size for name in bundle.digests) / 1e6
    return [
        *(
            Row(
                f"a job with the bundle's keeper, {name}",
                f"{took[name]:.0f} ms",
                f"installed keeper {took['installed']:.0f} ms",
                f"{took[name] / took['installed']:.2f} x",
                "<= 1.5 x",
                took[name] <= 1.5 * took["installed"],
            )
            for name in ("of this Python", "frozen")
        ),
        Row("size of the bundle", f"{size_mb:.0f} MB", "-", "-", f"<= {MOST_MB} MB", size_mb <= MOST_MB),
    ]


if __name__ == "__main__":
    print(render(bundled_start()))
