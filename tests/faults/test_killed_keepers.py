"""Keepers are killed in the first 40 ms of a trial. No report is lost, no process is left, and no trial becomes terminal too
early.
"""

import random
import sys

import pytest
from amounts import amount
from keeper_kills import REPORTS, TRAIN, KeeperKiller

KILLS = amount(2, 100)
# Each kill takes at most this many seconds: a new job starts, and some trials run before the next kill.
_MAX_KILL_S = 12.0

pytestmark = [pytest.mark.smoke, pytest.mark.timeout(120 + KILLS * _MAX_KILL_S)]

REUSE = {"localConfig": {"reuse": True}}
KINDS = {
    "plain": ({}, (0,)),
    "reuse": (REUSE, (0, 1, 2)),
    # The first trial of a job is always a cold start, so the test does not kill the keeper during this trial.
    "warm": (REUSE | {"warmImports": ["time", "nni_sdk"]}, (1, 2)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_no_report_is_lost_and_no_process_remains_if_a_keeper_is_killed_while_a_trial_starts(
    a_real_experiment, tmp_path, kind
):
    config, choices = KINDS[kind]
    draw = random.Random(KILLS)
    exempt_sessions = [draw.choice(choices) for _ in range(KILLS)]
    ledgers = tmp_path / "marks" / "ledgers"
    ledgers.mkdir(parents=True)
    experiment = a_real_experiment(
        TRAIN.format(ledgers=str(ledgers), reports=REPORTS),
        trialConcurrency=1,
        maxTrialNum=sum(exempt_sessions) + KILLS + 1,
        trial={"command": f"{sys.executable} train.py", "codeDir": "."},
        **config,
    )
    experiment.start()
    verdict = KeeperKiller(experiment, ledgers, exempt_sessions, draw).run(KILLS * _MAX_KILL_S + 60)
    print(verdict.line(kind))
    assert verdict.wrong == []
    assert (verdict.lost, verdict.left, verdict.too_early) == (0, 0, 0)
    assert verdict.kills == KILLS
