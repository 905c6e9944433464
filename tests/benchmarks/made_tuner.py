"""Tuners for measurements, created like those of an experiment."""

import json
import tempfile
from pathlib import Path
from typing import Any

from nni_manager.config.reader import read_experiment_file
from nni_manager.tuner.base import BaseTuner
from nni_manager.tuner.registry import make_tuner


def made_tuner(name: str, space: dict[str, Any], **class_args: Any) -> BaseTuner:
    """The tuner of an experiment file with this search space and these classArgs; it minimises."""
    document = {
        "experimentName": "measured",
        "trialCommand": "true",
        "trialCodeDirectory": ".",
        "trialConcurrency": 1,
        "trainingService": {"platform": "local"},
        "searchSpace": space,
        "tuner": {"name": name, "classArgs": {"optimize_mode": "minimize", **class_args}},
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "experiment.yml")
        # The reader expects YAML. Every JSON document is also valid YAML.
        file.write_text(json.dumps(document))
        return make_tuner(read_experiment_file(file))
