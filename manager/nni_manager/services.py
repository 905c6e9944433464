"""From an experiment's file to the cluster it runs on: the one place that knows all kinds of training services."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from urllib.parse import urlsplit

from nni_manager.config.mistakes import ConfigInvalid
from nni_manager.config.model import ExperimentConfig, PaiConfig
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import UserMistake
from nni_manager.store.folders import ExperimentFolder
from nni_manager.training_services.base import JobEnded, TrainingService
from nni_manager.training_services.local.client import LocalTrainingService
from nni_manager.training_services.openpai.client import OpenPaiService
from nni_manager.training_services.openpai.job import template_of
from nni_manager.training_services.openpai.rest import OpenPai, Patience

_LOOPBACK = "127."
# Any port: asking which way packets would take sends none.
_ANY_PORT = 9


def make_service(
    config: ExperimentConfig, folder: ExperimentFolder
) -> Callable[[Callable[[JobEnded], None]], TrainingService]:
    """What makes the experiment's training service, on the loop where it will live.

    Raises:
        UserMistake: the cluster or its job file cannot be used.
        TryAgain: the cluster of this machine does not start now.
    """
    pai = config.pai
    if pai is None:
        return lambda on_job_ended: LocalTrainingService(config, folder.workspace, folder.jobs, on_job_ended)
    template, cluster = template_of(pai), open_cluster(_with_todays_login(config, pai))
    return lambda on_job_ended: OpenPaiService(
        cluster,
        template,
        pai.mount,
        folder.workspace,
        on_job_ended,
        python=sys.executable if pai.is_local else None,
    )


def open_cluster(pai: PaiConfig, patience: Patience | None = None) -> OpenPai:
    """The cluster that an experiment file names.

    Raises:
        UserMistake: it names none.
        TryAgain: the cluster of this machine does not start now.
    """
    return OpenPai(pai.host, pai.user, token=pai.token, password=pai.password, patience=patience)


def address_for_keepers(config: ExperimentConfig) -> str:
    """The address of this machine at which the jobs' keepers reach it: loopback where they run here.

    Raises:
        UserMistake: the cluster's host has no address.
    """
    if config.pai is None or config.pai.is_local:
        return "127.0.0.1"
    if config.nni_manager_ip is not None:
        return config.nni_manager_ip
    host = urlsplit(open_cluster(config.pai).address).hostname
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, _ANY_PORT))
        except OSError as error:
            raise UserMistake(
                f"cannot find the way to OpenPAI at {host}: {error.strerror}; correct paiConfig.host, or write the address of "
                "this machine as nniManagerIp"
            ) from error
        address: str = probe.getsockname()[0]
    return address


def listens_at(address: str) -> str:
    """Where to listen so that `address` is reached: only there on loopback, else on all networks of this machine."""
    return address if address.startswith(_LOOPBACK) else "0.0.0.0"


def _with_todays_login(config: ExperimentConfig, stored: PaiConfig) -> PaiConfig:
    """The login of the experiment file as it is now: tokens expire while an experiment waits to be resumed."""
    try:
        today = read_experiment_file(config.config_path).pai
    except ConfigInvalid:
        return stored
    is_the_same = today is not None and (today.host, today.user) == (stored.host, stored.user)
    return today if today is not None and is_the_same else stored
