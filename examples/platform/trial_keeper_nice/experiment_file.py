"""The keys of the platform in an experiment file."""

from nni_manager.config.experiment_schema import ExperimentKeys, ServiceKeys
from nni_manager.config.platform_file import PlatformFile
from nni_manager.config.schema import mapping, text, whole


class NiceServiceKeys(ServiceKeys):
    niceness: int = whole(0, 19, "10", 10, about="the niceness of trials")


class NiceExperimentKeys(ExperimentKeys):
    trial_command: str = text("a shell command", "python3 train.py", v1="trial.command")
    training_service: NiceServiceKeys = mapping("{platform: nice}", v1="niceConfig")


class FILE(PlatformFile):
    schema = NiceExperimentKeys
    reuses_jobs = False
