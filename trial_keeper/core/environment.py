"""The environment of a trial."""

import json
from collections.abc import Mapping

from trial_keeper.settings import without_settings
from trial_keeper.wire.documents import TrialDocument
from trial_keeper.wire.workspace import MARKER, AttemptFolder, TrialFolder, Workspace

RESULT_METRICS = "NNI_RESULT_METRICS"
"""The metrics that a final result must have, as a JSON list. nni_sdk, which cannot import this, has the same name."""


def trial_environ(
    container: Mapping[str, str],
    experiment_id: str,
    trial: TrialDocument,
    folder: AttemptFolder,
    workspace: Workspace,
) -> dict[str, str]:
    """Return the container's variables without the keeper's own, plus NNI's variables of a trial.

    NNI_PLATFORM is `local` on every platform: the real `nni` package then appends its metrics to a file, as nni_sdk does.
    The workspace's nni_sdk, and its nni for a Python without that package, come last on the Python path. Their folder contains no
    other package, so user code may pin any version.
    Source: NNI v3.0 trial environment variables.
    """
    environ = without_settings(container) | {
        "NNI_PLATFORM": "local",
        "NNI_EXP_ID": experiment_id,
        "NNI_TRIAL_JOB_ID": trial.trial_id,
        "NNI_TRIAL_SEQ_ID": str(trial.sequence_id),
        MARKER: str(folder.path),
        "NNI_OUTPUT_DIR": str(folder.output),
        "NNI_CHECKPOINT_DIR": str(TrialFolder(workspace.trials / trial.trial_id).checkpoints),
        "NNI_CODE_DIR": trial.code_dir,
        # An empty entry would put the current folder on the path.
        "PYTHONPATH": ":".join(filter(None, (container.get("PYTHONPATH"), str(workspace.sdk)))),
        "PYTHONUNBUFFERED": "1",
    }
    if trial.seed is not None:
        environ["NNI_SEED"] = str(trial.seed)
    environ.pop(RESULT_METRICS, None)  # of an experiment around this one
    if trial.result_metrics:
        environ[RESULT_METRICS] = json.dumps(trial.result_metrics)
    if trial.gpu_indices is not None:
        # Some CUDA versions ignore an empty list; -1 hides all GPUs from every version.
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, trial.gpu_indices)) or "-1"
        # The driver's numbers, as nvidia-smi shows them. CUDA's own order puts the fastest GPU first.
        environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    return environ
