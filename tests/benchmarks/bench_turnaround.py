"""The delay between two trials, with the real manager; compared with bare processes, bare forks, Ray Tune and Syne Tune."""

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from deadlines import scaled_s

# Make the helper modules of tests/fakes importable.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from real_experiment import RealExperiment
from table import Row, render
from trial_peers import PeerLacking, ray_times, syne_times

TURNS = 200
SINGLE_TURNS = 20
# Only a few trials of Syne Tune run with its default poll interval, because up to 5 s pass between two of these trials.
POLLED_TURNS = 6
IMPORTING_TURNS = 12
IMPORTS = ("numpy", "sklearn.linear_model", "sklearn.model_selection", "sklearn.datasets")
# The script prints the time after its imports and at its end.
SCRIPT = "{}import time\nprint(time.time(), flush=True)\n{}print(time.time(), flush=True)\n"
# Trials that are compared with Ray Tune report a result, because each trial of Ray Tune reports one.
SDK = "import nni_sdk\n"
REPORT = "nni_sdk.report_final_result(1.0)\n"
WARM = ["time", "nni_sdk"]
# No real training is as short as a trial that does no work. So in further measurements, each trial sleeps for this time.
LASTING_MS = 20
# Without reuse, each keeper connects while its trial runs, which takes longer than a trial that does no work. So in a further
# measurement, each trial sleeps for this time.
SINGLE_LASTING_MS = 200
_PLAIN_EXTRA_MS = 10.0
# The goal in milliseconds is for the reference machine, where Ray Tune takes 6.3 ms and a bare start 13.7 ms. On another machine,
# the goal is the same share of Ray Tune's time.
_WARM_GOAL_MS = 6.0
_WARM_GOAL_OF_RAY = _WARM_GOAL_MS / 6.3
_IMPORTING_GAIN = 20
# A trial in a job of its own may take 3 times as long as a bare start. With NNI 3.0, it takes 65 times as long: 0.89 s on a
# machine where a bare start takes 13.7 ms.
_SINGLE_GOAL = 3
# The measurements use a folder in memory if there is one, because a disk creates files slowly after large deletions.
_MEMORY = Path("/dev/shm")

# This minimal fork server is the lower limit of a warm start: it compiles a script once, and runs it in a fork for each line of
# stdin.
FORKING = """
import os, sys, time
script, shown, *imports = sys.argv[1:]
for name in imports:
    __import__(name)
code = compile(open(script).read(), script, "exec")
for _ in sys.stdin:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(shown, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), 1)
        exec(code, {"__name__": "__main__"})
        os._exit(0)
    os.waitpid(pid, 0)
    print(flush=True)
"""


@dataclass(frozen=True)
class RayTune:
    """The median time between two Ray Tune trials in one process: with the default loggers, which write result files, and without
    loggers.
    """

    recording_ms: float
    unrecorded_ms: float


def turnaround() -> list[Row]:
    """Median time from the last line of a trial to the first line of the next trial. Variants: one job per trial; one reused job
    with cold starts, with warm imports, or with slow imports.
    """
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        root = Path(folder)
        trivial = SCRIPT.format("", "")
        reporting = SCRIPT.format(SDK, REPORT)
        lasting = SCRIPT.format(SDK, f"time.sleep({LASTING_MS / 1e3})\n{REPORT}")
        importing = SCRIPT.format("".join(f"import {name}\n" for name in IMPORTS), "")
        # The bare start and the fork are measured before and after the trials. The mean of both measurements compensates for a
        # change of the machine's speed.
        before = _bare_ms(root, trivial, TURNS // 4), _fork_ms(root, trivial, (), TURNS // 4)
        single_ms = _ours_ms(root / "single", trivial, SINGLE_TURNS, localConfig={})
        lasting_single = SCRIPT.format("", f"time.sleep({SINGLE_LASTING_MS / 1e3})\n")
        single_lasting_ms = _ours_ms(root / "single_lasting", lasting_single, SINGLE_TURNS, localConfig={})
        syne = syne_tune(root / "syne", SINGLE_TURNS, POLLED_TURNS)
        plain_ms = _ours_ms(root / "plain", trivial, TURNS)
        warm_ms = _ours_ms(root / "warm", reporting, TURNS, warmImports=WARM)
        no_work_ray, lasting_ray = ray_tune(root / "ray", TURNS, 0, LASTING_MS)
        lasting_ms = _ours_ms(root / "lasting", lasting, TURNS, warmImports=WARM)
        after = _bare_ms(root, trivial, TURNS // 4), _fork_ms(root, trivial, (), TURNS // 4)
        bare_importing_ms = _bare_ms(root, importing, IMPORTING_TURNS // 2)
        warm_importing_ms = _ours_ms(
            root / "importing", importing, IMPORTING_TURNS, warmImports=list(IMPORTS)
        )
    bare_ms, fork_ms = (statistics.mean(pair) for pair in zip(before, after, strict=True))
    gain = bare_importing_ms / warm_importing_ms
    return [
        *(
            Row(
                f"trial end -> next trial's first line, no reuse, trials of {of}",
                f"{ours_ms:.0f} ms",
                f"subprocess.run {bare_ms:.0f} ms, {syne}",
                f"{ours_ms / bare_ms:.1f} x",
                f"<= {_SINGLE_GOAL} x",
                ours_ms / bare_ms <= _SINGLE_GOAL,
            )
            for of, ours_ms in ((f"{SINGLE_LASTING_MS} ms", single_lasting_ms), ("no work", single_ms))
        ),
        Row(
            "reuse: trial end -> next trial's first line, plain",
            f"{plain_ms:.1f} ms",
            f"subprocess.run {bare_ms:.1f} ms",
            f"{plain_ms - bare_ms:+.1f} ms",
            f"<= +{_PLAIN_EXTRA_MS:.0f} ms",
            plain_ms - bare_ms <= _PLAIN_EXTRA_MS,
        ),
        warm_row(f"trials of {LASTING_MS} ms", lasting_ms, fork_ms, lasting_ray),
        warm_row("trials of no work", warm_ms, fork_ms, no_work_ray),
        Row(
            "the same, importing numpy and scikit-learn",
            f"{warm_importing_ms:.0f} ms",
            f"subprocess.run {bare_importing_ms:.0f} ms",
            f"1/{gain:.0f}",
            f">= {_IMPORTING_GAIN} x faster",
            gain >= _IMPORTING_GAIN,
        ),
    ]


def warm_row(of: str, ours_ms: float, fork_ms: float, ray: RayTune | str) -> Row:
    """The result row of warm trials. `ray` is an element of the list that `ray_tune` returns."""
    floor = f"fork {fork_ms:.1f} ms"
    ratio = f"{ours_ms / fork_ms:.1f} x the fork"
    goal = f"<= {_WARM_GOAL_MS:.0f} ms"
    holds = ours_ms <= _WARM_GOAL_MS
    if isinstance(ray, RayTune):
        floor += f", Ray Tune {ray.recording_ms:.1f} ms ({ray.unrecorded_ms:.1f} without its records)"
        ratio += f", {ours_ms / ray.recording_ms:.2f} x Ray Tune ({ours_ms / ray.unrecorded_ms:.2f})"
        goal += f", or <= {_WARM_GOAL_OF_RAY:.2f} x Ray Tune"
        holds = holds or ours_ms <= _WARM_GOAL_OF_RAY * ray.recording_ms
    else:
        floor += f"; {ray}"
    return Row(f"the same, warm, {of}", f"{ours_ms:.1f} ms", floor, ratio, goal, holds)


def ray_tune(folder: Path, turns: int, *lengths_ms: int) -> list[RayTune | str]:
    """For each trial length, the time between two Ray Tune trials, or the reason why it could not be measured."""
    folder.mkdir()
    try:
        times = ray_times(folder, turns, *lengths_ms)
    except PeerLacking as lacking:
        return [f"{lacking}"] * len(lengths_ms)
    return [RayTune(*(_gap_ms(each[turns // 2 :]) for each in both)) for both in times]


def syne_tune(folder: Path, turns: int, polled_turns: int) -> str:
    """The time between two Syne Tune trials as text, or the reason why it could not be measured."""
    try:
        gaps_ms = []
        for has_default_poll, count in ((False, turns), (True, polled_turns)):
            own = folder / ("default" if has_default_poll else "shortest")
            own.mkdir(parents=True)
            gaps_ms.append(_gap_ms(syne_times(own, count, has_default_poll=has_default_poll)))
    except PeerLacking as lacking:
        return f"{lacking}"
    return "Syne Tune {:.0f} ms ({:.0f} with its default poll)".format(*gaps_ms)


def _bare_ms(root: Path, script: str, turns: int) -> float:
    path = root / "bare.py"
    path.write_text(script)
    times = []
    for _ in range(turns):
        shown = subprocess.run([sys.executable, path], capture_output=True, check=True).stdout.split()
        times.append((float(shown[0]), float(shown[1])))
    return _gap_ms(times)


def _fork_ms(root: Path, script: str, imports: tuple[str, ...], turns: int) -> float:
    path, shown = root / "fork.py", root / "shown"
    path.write_text(script)
    shown.unlink(missing_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, path, shown, *imports],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as forking:
        assert forking.stdin is not None
        assert forking.stdout is not None
        for _ in range(turns):
            forking.stdin.write("\n")
            forking.stdin.flush()
            forking.stdout.readline()
        forking.stdin.close()
    lines = [float(line) for line in shown.read_text().split()]
    return _gap_ms(list(zip(lines[::2], lines[1::2], strict=True)))


def _ours_ms(folder: Path, script: str, turns: int, **config: object) -> float:
    """Run an experiment, one trial at a time. The first half of the trials, which may still import modules, does not count."""
    reuses = config.setdefault("localConfig", {"reuse": True})
    experiment = RealExperiment(
        folder,
        script,
        trialConcurrency=1,
        maxTrialNum=turns,
        environ={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        **config,
    )
    experiment.create()
    try:
        experiment.start()
        # The status is polled only once a second, because each poll costs milliseconds of processor time on the cores that the
        # trials use.
        experiment.wait_for_status("DONE", timeout_s=scaled_s(180), every_s=1.0)
        times = [
            tuple(map(float, path.read_text().split()))
            for path in experiment.folder.workspace.trials.glob("*/attempts/*/*/output/stdout")
        ]
        assert not reuses or len(experiment.keeper_pids()) == 1, "more than one job ran"
    finally:
        experiment.close()
    return _gap_ms(sorted(times)[turns // 2 :])


def _gap_ms(times: "list[tuple[float, ...]]") -> float:
    return (
        statistics.median(following[0] - before[1] for before, following in itertools.pairwise(times)) * 1e3
    )


if __name__ == "__main__":
    print(render(turnaround()))
