"""An experiment from Python: begin it, wait for it, ask it, change it, end it.

Theory of operation. `start` makes what `nnictl create` makes: a folder, an entry in the registry, and a manager, which is a
process of its own. Everything else asks that manager over HTTP; once it has ended, what is stored answers in its place. The
manager holds one end of a pipe of which this process holds the other (`client.lifeline`): when this process ends, however it
does, the manager stops the experiment and ends. With `RunMode.Detach` there is no such pipe.

Source: NNI v2.10 and v3.0, nni.experiment.Experiment.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import enum
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from nni_manager.client import manager_process, output, preflight, watch
from nni_manager.client.experiments import (
    KnownExperiment,
    known_experiments,
    look,
    resolve,
)
from nni_manager.client.lifeline import Lifeline
from nni_manager.client.links import print_links
from nni_manager.client.manager_client import ManagerSilent, api_url
from nni_manager.config.mistakes import ConfigInvalid
from nni_manager.config.python_document import in_python_words
from nni_manager.errors import NniManagerError, UserMistake
from nni_manager.experiment.config import ExperimentConfig
from nni_manager.experiment.data import TrialJob, TrialMetricData, TrialResult, frame_of
from nni_manager.experiment.progress import NOTEBOOK_EVERY_S, LogTail, NotebookView, is_in_notebook
from nni_manager.experiment.spelling import NoSuchField
from nni_manager.store.folders import ExperimentFolder, ManagerProcess, Registry

if TYPE_CHECKING:
    import pandas

Port: TypeAlias = int | Literal["auto"]
"""A port of this machine; keepers use the next one. "auto": the first two that are free, from 8080 on."""
_Answer = TypeVar("_Answer")
# It becomes a part of the names of jobs.
_ID = re.compile(r"[A-Za-z0-9]{1,32}")
_OF_COMMAND_LINE = {r"--port N or --port auto": 'port=N or port="auto"', r"--port (N|\d+)": r"port=\1"}


class NotStarted(UserMistake):
    """cannot ask an experiment that has not been started; call start() or run() first"""


class RunMode(enum.Enum):
    """What becomes of the manager when Python ends, and of its log.

    Background: it stops the experiment; its log is in its folder. Foreground: the same, and its log is on stdout, too. Detach: it
    goes on, as after `nnictl create`.
    """

    Background = "background"
    Foreground = "foreground"
    Detach = "detach"


class Experiment:
    """One experiment. Whatever this object starts ends with `stop`, with its `with` block, or with Python.

    `config` is what it will be made of. `id` and `port` are None until it is started; `id` stays, and results can be asked for
    when it has been stopped.

    >>> experiment = Experiment("local")
    >>> experiment.config.trial_command = "python3 train.py"
    >>> experiment.config.tuner.name = "TPE"
    """

    def __init__(
        self,
        config_or_platform: ExperimentConfig | str | list[str] | None = None,
        id: str | None = None,
    ) -> None:
        """Prepare an experiment; nothing is started.

        A platform makes a configuration for it: local, openpai, frameworkcontroller or kubeflow. `id`: that of one there is, to
        resume or view it, or, with a configuration, the one it is to have.

        Raises:
            PlatformUnknown: there is no such platform.
            UserMistake: no experiment can have this id.
        """
        if id is not None:
            _check_id(id)
        if isinstance(config_or_platform, str | list):
            config_or_platform = ExperimentConfig(config_or_platform)  # type: ignore[arg-type]  # a list is refused there
        if not isinstance(config_or_platform, ExperimentConfig | None):
            raise UserMistake(
                f"cannot make an experiment of {type(config_or_platform).__name__}; write a platform, such as "
                "Experiment('local'), or an ExperimentConfig"
            )
        self._config = config_or_platform
        self._given_id = id
        self.id: str | None = id
        self.port: int | None = None
        self._folder: ExperimentFolder | None = None
        self._lifeline: Lifeline | None = None
        self._log: LogTail | None = None
        self._is_stopping = False
        self._pid = os.getpid()

    @property
    def config(self) -> ExperimentConfig:
        """The configuration, to be changed until it is started.

        Raises:
            UserMistake: it was made elsewhere, and this object has none.
        """
        if self._config is None and self.id is None:
            raise UserMistake(
                "cannot start an experiment without a configuration; write Experiment('local'), or Experiment(config)"
            )
        if self._config is None:
            raise UserMistake(
                "cannot look into the configuration of an experiment that was made elsewhere; get_experiment_profile() tells "
                "what it is made of, and Experiment('local') prepares a new one"
            )
        return self._config

    @config.setter
    def config(self, config: ExperimentConfig) -> None:
        if not isinstance(config, ExperimentConfig):
            raise UserMistake(
                f"cannot make an experiment of {type(config).__name__}; write an ExperimentConfig, such as "
                "ExperimentConfig('local')"
            )
        self._config = config

    if not TYPE_CHECKING:  # which refuses by itself what there is not

        def __setattr__(self, name: str, value: Any) -> None:
            """Set what an experiment has. What is its configuration's would have no effect here.

            Raises:
                NoSuchField: it is a field of the configuration.
            """
            if name in ExperimentConfig.field_names():
                raise NoSuchField(
                    f"cannot set {name} of an experiment: it is a field of its configuration; set experiment.config.{name}"
                )
            object.__setattr__(self, name, value)

    def __enter__(self) -> Experiment:
        """This experiment; when the block ends, it is stopped if this object has started it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what this object has started."""
        # Who has been interrupted while it stopped does not wait again.
        if self._lifeline is not None and not self._is_stopping and self._is_of_this_process():
            self.stop()

    # ---- its life

    def start(self, port: Port = 8080, debug: bool = False, run_mode: RunMode = RunMode.Background) -> None:
        """Start it, and come back as soon as its manager is ready. `debug`: more log, and no version check.

        Raises:
            ConfigInvalid: with every mistake of the configuration.
            UserMistake: it runs already, its port is taken, or the platform lacks something.
            TryAgain: a cluster does not answer.
        """
        self._refuse_if_it_runs()
        _check_run_mode(run_mode)
        with _in_words_of_python():
            config = self.config.checked()
            if debug:
                config = dataclasses.replace(config, debug=True, version_check=False)
            place = preflight.check_platform(config)
            ports = _ports(port)
            for warning in (*config.warnings, *place.warnings):
                output.warning(in_python_words(warning))
            if place.where:
                output.info(f"run jobs on {place.where}")
            with self._tied(run_mode) as lifeline:
                known = manager_process.create_experiment(
                    config,
                    secrets.token_bytes(32),
                    ports,
                    debug,
                    lifeline=lifeline,
                    experiment_id=self._given_id,
                )
        self._note_started(known, known.manager, run_mode)

    def run(self, port: Port = 8080, wait_completion: bool = True, debug: bool = False) -> bool | None:
        """Start it and wait until it is over, with its progress shown; whether it came to its end without an error.

        A warning says so if no trial has a result. It stays to be asked until `stop` or the end of Python. After Ctrl-C it is
        stopped, and the answer is None; Ctrl-C once more does not wait for that. Without `wait_completion` this is `start`,
        and the answer is None.

        Raises:
            ConfigInvalid, UserMistake, TryAgain: see `start`.
            ManagerGone: its manager died meanwhile.
        """
        return self._and_wait(lambda: self.start(port, debug), wait_completion)

    def stop(self) -> None:
        """Stop it: its trials are cancelled, its manager ends, its data stays. A view ends. No matter if it does not run.

        Raises:
            ManagerStuck: the manager had to be ended by a signal; the message says what may go on.
        """
        if self._folder is None:
            return
        self._is_stopping = True
        known = look(self._folder)
        if known is not None and known.view is not None:
            manager_process.end_view(known)
        if known is not None and known.manager is not None:
            output.info(f"Stopping experiment {self.id}")
            manager_process.stop_experiment(known, output.info)
            output.info(f"Experiment {self.id} is stopped; Experiment.resume({self.id!r}) goes on with it")
        self._let_go()

    @classmethod
    def connect(cls, port: int) -> Experiment:
        """The experiment of this user and machine whose manager, or whose view, is on this port. It goes on when Python ends.

        Raises:
            UserMistake: there is none.
        """
        for known in known_experiments():
            server = known.manager or known.view
            if server is not None and server.port == port:
                found = cls(None)
                found.id, found.port, found._folder = known.experiment_id, port, known.folder
                return found
        raise UserMistake(
            f"cannot connect to port {port}: no experiment of yours is there; `nnictl experiment list` shows those that run"
        )

    @overload
    def resume(  # type: ignore[misc]  # Experiment.resume("ID"), as NNI v2 has it
        self: str, port: Port = 8080, wait_completion: bool = True, debug: bool = False
    ) -> Experiment: ...

    @overload
    def resume(self, port: Port = 8080, wait_completion: bool = True, debug: bool = False) -> bool | None: ...

    def resume(
        self: Experiment | str, port: Port = 8080, wait_completion: bool = True, debug: bool = False
    ) -> Experiment | bool | None:
        """Go on with an experiment whose manager does not run; otherwise as `run`.

        `Experiment.resume("ID")` gives the experiment, and `Experiment(id="ID").resume()` what `run` gives.

        Raises:
            UserMistake: there is none, or it runs.
            ManagerGone: its manager died meanwhile.
        """
        if not isinstance(self, Experiment):
            found = _of_id(self)
            found.resume(port, wait_completion, debug)
            return found
        return self._and_wait(lambda: self._resume(port, debug), wait_completion)

    @overload
    def view(  # type: ignore[misc]  # Experiment.view("ID"), as NNI v2 has it
        self: str, port: Port = 8080, non_blocking: bool = False
    ) -> Experiment: ...

    @overload
    def view(self, port: Port = 8080, non_blocking: bool = False) -> Experiment: ...

    def view(self: Experiment | str, port: Port = 8080, non_blocking: bool = False) -> Experiment:
        """Serve a stored experiment, to be looked at and not changed: until Ctrl-C, or, `non_blocking`, until `stop`.

        Raises:
            UserMistake: there is none, it runs, or the port is taken.
        """
        if not isinstance(self, Experiment):
            return _of_id(self).view(port, non_blocking)
        known = self._stored()
        with _in_words_of_python():
            ports = _ports(port, count=1)
            with self._tied(RunMode.Background) as lifeline:
                known = manager_process.start_view(known.folder, ports, lifeline=lifeline)
        self._note_started(known, known.view, RunMode.Background)
        if not non_blocking:
            try:
                manager_process.wait_for_view(known)
            except KeyboardInterrupt:
                output.info(f"Ctrl-C: experiment {self.id} is served no more")
            finally:
                self.stop()
        return self

    def run_or_resume(
        self, port: Port = 8080, wait_completion: bool = True, debug: bool = False
    ) -> bool | None:
        """Go on with the experiment of this id if there is one, or run it; the answer is that of `run`.

        Raises:
            ConfigInvalid, UserMistake, TryAgain, ManagerGone: see `run`.
        """
        how = self.resume if self.has_checkpoint() else self.run
        return how(port, wait_completion, debug)

    def has_checkpoint(self) -> bool:
        """Whether something is stored of the experiment of this id."""
        return any(
            folder.experiment_id == self.id and folder.has_database() for folder in Registry.of_user().all()
        )

    def load_checkpoint(self) -> None:
        """See that something is stored; `resume` finds all of it by itself.

        Raises:
            UserMistake: there is nothing.
        """
        self._stored()

    # ---- what is known of it

    def get_status(self) -> str:
        """INITIALIZED, RUNNING, NO_MORE_TRIAL, TUNER_NO_MORE_TRIAL, DONE, ERROR, STOPPING or STOPPED."""
        return str(self._ask(KnownExperiment.status)["status"])

    def get_trial_job(self, trial_job_id: str) -> TrialJob:
        """One trial.

        Raises:
            UserMistake: there is none of this id.
        """
        return TrialJob.of(self._ask(lambda known: known.trial(trial_job_id)))

    def list_trial_jobs(self) -> list[TrialJob]:
        """All trials, in the order they were made."""
        return [TrialJob.of(each) for each in self._ask(KnownExperiment.trials)]

    def get_job_statistics(self) -> list[dict[str, Any]]:
        """How many trials have each status: `trialJobStatus` and `trialJobNumber`."""
        return self._ask(KnownExperiment.statistics)

    def get_job_metrics(self, trial_job_id: str | None = None) -> dict[str, list[TrialMetricData]]:
        """All that was reported, by trial, in the order it came; of one trial alone if its id is given.

        Raises:
            UserMistake: there is no trial of this id.
        """
        if trial_job_id is not None:
            self.get_trial_job(trial_job_id)
        found: dict[str, list[TrialMetricData]] = {}
        for each in self._ask(lambda known: known.metrics(trial_job_id)):
            found.setdefault(each["trialJobId"], []).append(TrialMetricData.of(each))
        return found

    def get_experiment_profile(self) -> dict[str, Any]:
        """Its limits, search space, tuner and trial, with the keys of NNI's REST interface."""
        return self._ask(KnownExperiment.profile)

    def get_experiment_metadata(self, exp_id: str) -> dict[str, Any]:
        """What a list shows of one experiment of this user; empty when there is none of this id."""
        lines = self.get_all_experiments_metadata()
        return next((line for line in lines if line["id"] == exp_id), {})

    def get_all_experiments_metadata(self) -> list[dict[str, Any]]:
        """What a list shows of all experiments of this user."""
        return [known.line() for known in known_experiments()]

    @overload
    def export_data(self, as_frame: Literal[False] = False) -> list[TrialResult]: ...

    @overload
    def export_data(self, as_frame: Literal[True]) -> pandas.DataFrame: ...

    @overload
    def export_data(self, as_frame: bool) -> list[TrialResult] | pandas.DataFrame: ...

    def export_data(self, as_frame: bool = False) -> list[TrialResult] | pandas.DataFrame:
        """Parameters and results of the trials that succeeded: as records, or as a data frame of pandas.

        Raises:
            PandasMissing: a frame is asked for, and pandas is not installed.
        """
        results = [TrialResult.of(each) for each in self._ask(KnownExperiment.results)]
        return frame_of(results) if as_frame else results

    # ---- what can be changed while it runs

    def update_trial_concurrency(self, value: int) -> None:
        """Run as many trials at a time from now on.

        Raises:
            UserMistake: it does not run, or the value is none.
        """
        self._update("TRIAL_CONCURRENCY", "trialConcurrency", value)

    def update_max_experiment_duration(self, value: str | int) -> None:
        """Stop asking for trials after so much time, such as "90m", counted from its start.

        Raises:
            UserMistake: it does not run, or the value is none.
        """
        self._update("MAX_EXEC_DURATION", "maxExperimentDuration", value)

    def update_max_trial_number(self, value: int) -> None:
        """Stop asking for trials after so many. An experiment that is DONE for this goes on when it is raised.

        Raises:
            UserMistake: it does not run, or the value is none.
        """
        self._update("MAX_TRIAL_NUM", "maxTrialNumber", value)

    def update_max_trial_duration(self, value: str | int) -> None:
        """Stop each trial that runs for longer, such as "30m".

        Raises:
            UserMistake: it does not run, or the value is none.
        """
        self._update("MAX_TRIAL_DURATION", "maxTrialDuration", value)

    def update_search_space(self, value: Mapping[str, Any]) -> None:
        """Propose trials of another search space from now on.

        Raises:
            UserMistake: it does not run, or the value is none; with every mistake of it.
        """
        self._update("SEARCH_SPACE", "searchSpace", value)

    def kill_trial_job(self, trial_job_id: str) -> None:
        """Stop one trial; the experiment goes on.

        Raises:
            UserMistake: there is none of this id, it is over, or the experiment does not run.
        """
        self.get_trial_job(trial_job_id)
        with _in_words_of_python():
            self._running("stop a trial of").delete("/trial-jobs", trial_job_id)

    # ---- within

    def _refuse_if_it_runs(self) -> None:
        if self._folder is None:
            return
        known = look(self._folder)
        if known is not None and known.is_served:
            raise UserMistake(
                f"cannot start experiment {self.id}: it is served on port {self.port}; stop() it first, or make another"
            )

    def _stored(self) -> KnownExperiment:
        """The experiment of this id, which does not run.

        Raises:
            UserMistake: there is none, or it runs.
        """
        if self.id is None:
            raise NotStarted(
                "cannot tell which experiment is meant; write its id, as in Experiment.resume('GvTf2bVe')"
            )
        known = _known_by(self.id)
        if known.manager is not None:
            raise UserMistake(
                f"cannot go on with experiment {known.experiment_id}: it runs; Experiment.connect({known.manager.port}) finds it"
            )
        return known

    def _resume(self, port: Port, debug: bool) -> None:
        known = self._stored()
        if known.view is not None:
            manager_process.end_view(known)
        with _in_words_of_python():
            ports = _ports(port)
            with self._tied(RunMode.Background) as lifeline:
                known = manager_process.start_manager(known.folder, ports, debug, lifeline=lifeline)
        self._note_started(known, known.manager, RunMode.Background)

    @contextlib.contextmanager
    def _tied(self, run_mode: RunMode) -> Iterator[Lifeline | None]:
        """What ties the manager to this process that is started meanwhile."""
        lifeline = None if run_mode is RunMode.Detach else Lifeline()
        try:
            yield lifeline
        except BaseException:
            if lifeline is not None:
                lifeline.cut()
            raise
        if lifeline is not None:
            lifeline.hand_over()
        self._lifeline = lifeline

    def _note_started(self, known: KnownExperiment, server: ManagerProcess | None, run_mode: RunMode) -> None:
        assert server is not None  # it has just been started
        self.id, self.port, self._folder = known.experiment_id, server.port, known.folder
        self._is_stopping = False
        self._pid = os.getpid()
        if run_mode is RunMode.Foreground:
            self._log = LogTail(known.folder.manager_log)
        if run_mode is not RunMode.Detach:
            atexit.register(self._stop_at_exit)
        output.info(f"Experiment {self.id} is served at {api_url(server)}")
        print_links(known.experiment_id, server)

    def _stop_at_exit(self) -> None:
        if not self._is_stopping and self._is_of_this_process():
            self.stop()

    def _is_of_this_process(self) -> bool:
        """Whether it was started here, and not by whoever forked this process."""
        return os.getpid() == self._pid

    def _let_go(self) -> None:
        atexit.unregister(self._stop_at_exit)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lifeline is not None:
            self._lifeline.cut()
            self._lifeline = None
        manager_process.reap()
        self.port = None

    def _and_wait(self, begin: Callable[[], None], wait_completion: bool) -> bool | None:
        try:
            begin()
            if not wait_completion:
                return None
            in_notebook = is_in_notebook()
            known = self._now()
            summary = (
                watch.follow(known, NOTEBOOK_EVERY_S, NotebookView()) if in_notebook else watch.follow(known)
            )
        except KeyboardInterrupt:
            if self._folder is None or self.port is None:
                raise  # it did not come to a start
            output.warning(f"Ctrl-C: experiment {self.id} is stopped")
            self.stop()
            return None
        if (why_not := watch.verdict(summary)) is not None:
            output.warning(in_python_words(str(why_not)))
        return bool(summary["status"] != "ERROR")

    def _now(self) -> KnownExperiment:
        if self._folder is None:
            if self.id is None:
                raise NotStarted
            self._folder = _known_by(self.id).folder
        known = look(self._folder)
        if known is None:
            raise UserMistake(f"cannot ask experiment {self.id}: it was deleted; start another")
        return known

    def _ask(self, question: Callable[[KnownExperiment], _Answer]) -> _Answer:
        """The answer of its manager or, when it has none any more, of what is stored."""
        known = self._now()
        with _in_words_of_python():
            try:
                return question(known)
            except ManagerSilent:
                known = self._now()
                if known.manager is not None:
                    raise
                return question(known)

    def _running(self, what: str) -> Any:
        client = self._now().client()
        if client is None:
            raise UserMistake(
                f"cannot {what} experiment {self.id}: it does not run; Experiment.resume({self.id!r}) goes on with it"
            )
        return client

    def _update(self, update_type: str, key: str, value: Any) -> None:
        with _in_words_of_python():
            self._running("change").put("/experiment", {"params": {key: value}}, update_type=update_type)


def _check_id(given: Any) -> None:
    if not isinstance(given, str) or not _ID.fullmatch(given):
        raise UserMistake(
            f"cannot use {given!r} as the id of an experiment: names of jobs hold it; write 1 to 32 letters and digits"
        )


def _check_run_mode(given: Any) -> None:
    if not isinstance(given, RunMode):
        known = ", ".join(map(str, RunMode))
        raise UserMistake(f"cannot start with run_mode={given!r}; write one of {known}")


def _of_id(given: Any) -> Experiment:
    """For `Experiment.resume(ID)` and `Experiment.view(ID)`: whatever a caller without types has for an id."""
    _check_id(given)
    return Experiment(id=given)


def _known_by(experiment_id: str) -> KnownExperiment:
    """The experiment of this id. Its beginning will not do: a program that asks for digits1 does not mean digits10.

    Raises:
        UserMistake: there is none.
    """
    found = resolve(experiment_id)
    if found.experiment_id != experiment_id:
        raise UserMistake(
            f"cannot find experiment {experiment_id!r}; did you mean {found.experiment_id}? "
            "`nnictl experiment list --all` shows those there are"
        )
    return found


def _ports(port: Port, count: int = 2) -> Iterable[int]:
    if port == "auto":
        return preflight.free_ports()
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= preflight.HIGHEST_PORT:
        raise UserMistake(
            f'cannot use port={port!r}: it is no number from 1 to {preflight.HIGHEST_PORT}; write one, or port="auto"'
        )
    preflight.check_ports(port, preflight.HOST, count)
    return [port]


@contextlib.contextmanager
def _in_words_of_python() -> Iterator[None]:
    """Errors name fields and arguments, and not keys of files and options of nnictl."""
    try:
        yield
    except ConfigInvalid:
        raise  # has the words of the document it is about
    except NniManagerError as error:
        said = in_python_words(str(error))
        for words, of_python in _OF_COMMAND_LINE.items():
            said = re.sub(words, of_python, said)
        if said == str(error):
            raise
        raise type(error)(said) from error
