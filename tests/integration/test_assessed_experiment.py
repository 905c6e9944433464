"""A whole experiment with an assessor that stops trials early and a tuner with a finite grid."""

import asyncio

from deadlines import DEADLINE_S
from void_service import Void

from nni_manager.engine.engine import Engine
from nni_manager.store.reader import StoreReader
from nni_manager.tuner.assessors import make_assessment
from nni_manager.tuner.registry import make_tuner

# Bad trials block after their first result.
TRAIN = """
import signal, nni_sdk
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x)
if x < 0.5:
    signal.pause()
nni_sdk.report_final_result(x)
"""


def test_medianstop_stops_bad_trials_early_and_restores_its_state_after_a_resume(a_real_experiment):
    experiment = a_real_experiment(
        TRAIN,
        space={"x": {"_type": "choice", "_value": [1.0, 0.0, 0.1]}},
        trialConcurrency=1,
        maxTrialNum=50,
        tuner={"builtinTunerName": "GridSearch"},
        assessor={"builtinAssessorName": "Medianstop"},
    )
    experiment.start()
    experiment.wait_for_status("DONE")
    experiment.close()
    with StoreReader(experiment.folder.database) as reader:
        trials = reader.trials()
    assert [(trial.parameters["x"], trial.state.value) for trial in trials] == [
        (1.0, "SUCCEEDED"),
        (0.0, "EARLY_STOPPED"),
        (0.1, "EARLY_STOPPED"),
    ]

    config = experiment.config
    unrestored, restored = make_assessment(config), make_assessment(config)

    async def restore():
        engine = Engine(config, experiment.folder, Void, make_tuner, restored)
        await engine.restore()
        await engine.close()

    asyncio.run(asyncio.wait_for(restore(), DEADLINE_S))
    assert unrestored.report(99, 0, (0.5,))
    assert not restored.report(99, 0, (0.5,))
    assert restored.report(98, 0, (1.0,))
