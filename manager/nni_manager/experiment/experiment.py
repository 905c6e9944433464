"""Starts, awaits and stops an experiment from Python; `queries` has its queries and changes.

Theory of operation. `start` does what `nnictl create` does: it creates a folder, an entry in the registry, and a manager
process. Manager and this process hold the two ends of a pipe (`client.parent_death_pipe`): when this process dies, the manager
stops the experiment and exits. With `RunMode.Detach` there is no such pipe.

Source: NNI v2.10 and v3.0, nni.experiment.Experiment.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import os
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from nni_manager.client import manager_process, manager_stop, output, watch
from nni_manager.client.experiments import KnownExperiment, known_experiment, known_experiments
from nni_manager.client.links import print_links
from nni_manager.client.manager_client import api_url
from nni_manager.client.parent_death_pipe import ParentDeathPipe
from nni_manager.client.warm_start import print_points, with_warm_start
from nni_manager.errors import UserError
from nni_manager.experiment.aliases import NoSuchField
from nni_manager.experiment.config import ExperimentConfig
from nni_manager.experiment.objective import ObjectiveFunction
from nni_manager.experiment.progress import NOTEBOOK_INTERVAL_S, LogTail, NotebookView, is_in_notebook
from nni_manager.experiment.python_terms import in_python, in_python_terms, summary_in_python
from nni_manager.experiment.queries import StartedExperiment, known_by_id
from nni_manager.experiment.start_arguments import Port, check_id, check_start, ports_from, web_server
from nni_manager.experiment.stored_config import store_login
from nni_manager.store.registry import Registry
from nni_manager.training_services.platform import platform_of

Function: TypeAlias = Callable[[dict[str, Any]], Any]
"""A function of a trial's parameters; it returns the trial's result: a number, or a dict with a number under "default"."""


class RunMode(enum.Enum):
    """The lifetime and the log output of the manager.

    Background: when Python exits, the manager stops the experiment and exits; its log is in the experiment's folder.
    Foreground: the same, and the log is also printed on stdout. Detach: the manager continues, as after `nnictl create`.
    """

    Background = "background"
    Foreground = "foreground"
    Detach = "detach"


class Experiment(StartedExperiment):
    """One experiment. `stop`, the end of its `with` block, or Python's exit stops what this object starts.

    `config` is its configuration. `id` and `port` are None until the experiment is started. `id` stays after `stop`, and
    results can still be queried. `url_prefix`, such as "lab/digits", precedes the paths of the web page and the HTTP API.
    `tls_certificate` and `tls_key`: PEM files, with which these use HTTPS. `verbose`: print progress, links and information on
    stderr; warnings are always printed.

    >>> experiment = Experiment("local")
    >>> experiment.config.trial_command = "python3 train.py"
    >>> experiment.config.tuner.name = "TPE"
    """

    def __init__(
        self,
        config_or_platform: ExperimentConfig | str | list[str] | None = None,
        id: str | None = None,
    ) -> None:
        """Prepare an experiment without starting it.

        The name of a platform, such as "local", creates a configuration for it. `id`: the id of an existing
        experiment to resume or view; with a configuration, the id of the new experiment.

        Raises:
            PlatformUnknown: the platform is unknown.
            UserError: the id is invalid.
        """
        if id is not None:
            check_id(id)
        if isinstance(config_or_platform, str | list):
            config_or_platform = ExperimentConfig(config_or_platform)  # type: ignore[arg-type]  # a list is refused there
        if not isinstance(config_or_platform, ExperimentConfig | None):
            raise UserError(
                f"cannot create an experiment from {type(config_or_platform).__name__}; pass a platform, such as "
                "Experiment('local'), or an ExperimentConfig"
            )
        self._config = config_or_platform
        self._given_id = id
        super().__init__(id)
        self.port: int | None = None
        self.verbose = True
        self.url_prefix: str | None = None
        self.tls_certificate: str | os.PathLike[str] | None = None
        self.tls_key: str | os.PathLike[str] | None = None
        self._parent_death_pipe: ParentDeathPipe | None = None
        self._log: LogTail | None = None
        self._is_stopping = False
        self._started_with: dict[str, Any] | None = None
        self._pid = os.getpid()

    @property
    def config(self) -> ExperimentConfig:
        """The configuration. It can be changed until the experiment is started.

        Raises:
            UserError: this object has no configuration, because the experiment was created elsewhere.
        """
        if self._config is None and self.id is None:
            raise UserError(
                "cannot start an experiment without a configuration; write Experiment('local'), or Experiment(config)"
            )
        if self._config is None:
            raise UserError(
                "cannot read the configuration of an experiment that was created elsewhere; get_experiment_profile() "
                "returns it, and Experiment('local') prepares a new one"
            )
        return self._config

    @config.setter
    def config(self, config: ExperimentConfig) -> None:
        if not isinstance(config, ExperimentConfig):
            raise UserError(
                f"cannot create an experiment from {type(config).__name__}; pass an ExperimentConfig, such as "
                "ExperimentConfig('local')"
            )
        self._config = config

    if not TYPE_CHECKING:  # type checkers refuse unknown attributes only without __setattr__

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute. Fields of the configuration are refused: they would have no effect here.

            Raises:
                NoSuchField: the name is a field of the configuration.
            """
            if name in ExperimentConfig.field_names():
                raise NoSuchField(
                    f"cannot set {name} of an experiment: it is a field of its configuration; set experiment.config.{name}"
                )
            object.__setattr__(self, name, value)

    def __enter__(self) -> Experiment:
        """This experiment. The end of the block stops an experiment that this object has started."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_what_it_started()

    # ---- life cycle

    def start(
        self,
        port: Port = "auto",
        debug: bool = False,
        run_mode: RunMode = RunMode.Background,
        *,
        objective: Function | None = None,
    ) -> None:
        """Start the experiment; return when its manager is ready. `debug`: verbose log, no version check.

        `objective`: the function that trials call with their parameters, on this machine; its result is the trial's.

        Raises:
            ConfigInvalid: with every error of the configuration.
            UserError: the experiment runs already, its port is in use, or the platform lacks a requirement.
            UserError: the function can be neither imported nor copied, or trials have a command.
            RetryableError: a cluster does not respond.
        """
        known = None if self._folder is None else known_experiment(self._folder)
        if known is not None and known.is_served:
            raise UserError(
                f"cannot start experiment {self.id}: it is served on port {self.port}; call stop() first, or create another"
            )
        if not isinstance(run_mode, RunMode):
            raise UserError(
                f"cannot start with run_mode={run_mode!r}; write one of {', '.join(map(str, RunMode))}"
            )
        check_start(port)
        made = None if objective is None else ObjectiveFunction.of(objective)
        with in_python_terms():
            config = with_warm_start(
                (self.config if made is None else made.applied_to(self.config)).checked()
            )
            platform = platform_of(config).check()
            ports = ports_from(port)
            for warning in (*config.warnings, *platform.warnings):
                output.warning(in_python(warning))
            with self._messages():
                print_points(config)
                if platform.where:
                    output.info(f"run jobs on {platform.where}")
            create = partial(
                manager_process.create_experiment,
                config,
                ports,
                debug,
                experiment_id=self._given_id,
                web=web_server(self.url_prefix, self.tls_certificate, self.tls_key),
                prepare=None if made is None else made.stored,
            )
            self._launch(run_mode, create)
            self._started_with = self.config.document()

    def run(
        self,
        port: Port = "auto",
        wait_completion: bool = True,
        debug: bool = False,
        *,
        objective: Function | None = None,
    ) -> bool | None:
        """Start the experiment, show its progress, and wait until it is terminal. True if it ended without an error.

        A warning is printed if no trial has a result. The manager keeps running, for queries, until `stop` or Python's exit.
        Ctrl-C stops the experiment and returns None; a second Ctrl-C does not wait for the stop. Without `wait_completion` the
        call returns None once the experiment is started. `objective`: see `start`.

        Raises:
            ConfigInvalid, UserError, RetryableError: see `start`.
            RetryableError: the manager died during the wait.
        """
        return self._and_wait(lambda: self.start(port, debug, objective=objective), wait_completion)

    def wait(self) -> bool:
        """Show the progress of a started experiment until it is terminal. True if it ended without an error.

        A warning is printed if no trial has a result. Ctrl-C ends the wait, not the experiment.

        Raises:
            UserError: it has not been started.
            RetryableError: the manager died during the wait, or does not answer.
        """
        known = self._now()
        if self._config is not None and self._started_with is not None:
            self._config.warn_of_changes_since(self._started_with)
        in_notebook = self.verbose and is_in_notebook()
        display = contextlib.nullcontext(NotebookView().show) if in_notebook else watch.display()
        interval_s = NOTEBOOK_INTERVAL_S if in_notebook else watch.REDRAW_INTERVAL_S
        with self._messages(), in_python_terms(), display as show:
            summary = watch.follow(known, interval_s, lambda each: show(summary_in_python(each)))
        if (why_not := watch.verdict(summary_in_python(summary))) is not None:
            output.warning(in_python(str(why_not)))
        return bool(summary["status"] != "ERROR")

    def stop(self) -> None:
        """Stop the experiment, or its view: cancel its trials, end its manager, keep its data. No effect if it does not run.

        Raises:
            RetryableError: the manager had to be killed by a signal; the message names what may still run.
        """
        if self._folder is None:
            return
        self._is_stopping = True
        known = known_experiment(self._folder)
        if known is not None and known.view is not None:
            manager_stop.end_view(known)
        if known is not None and known.manager is not None:
            with self._messages():
                output.info(f"Stopping experiment {self.id}")
                manager_stop.stop_experiment(known)
                output.info(f"Experiment {self.id} is stopped; Experiment.resume({self.id!r}) resumes it")
        self._release()

    @classmethod
    def connect(cls, port: int) -> Experiment:
        """The experiment of this user and machine whose manager or view listens on this port.

        It continues when Python exits.

        Raises:
            UserError: no experiment listens there.
        """
        for known in known_experiments():
            server = known.manager or known.view
            if server is not None and server.port == port:
                found = cls(None)
                found.id, found.port, found._folder = known.experiment_id, port, known.folder
                return found
        raise UserError(
            f"cannot connect to port {port}: none of your experiments uses it; `nnictl experiment list` lists their ports"
        )

    @overload
    def resume(  # type: ignore[misc]  # Experiment.resume("ID"), as NNI v2 has it
        self: str,
        port: Port = "auto",
        wait_completion: bool = True,
        debug: bool = False,
        *,
        objective: Function | None = None,
    ) -> Experiment: ...

    @overload
    def resume(
        self,
        port: Port = "auto",
        wait_completion: bool = True,
        debug: bool = False,
        *,
        objective: Function | None = None,
    ) -> bool | None: ...

    def resume(
        self: Experiment | str | None = None,
        port: Port = "auto",
        wait_completion: bool = True,
        debug: bool = False,
        *,
        objective: Function | None = None,
    ) -> Experiment | bool | None:
        """Resume an experiment whose manager does not run; otherwise like `run`.

        `Experiment.resume("ID")` returns the experiment, `Experiment(id="ID").resume()` the result of `run`. `objective`
        replaces the function of later trials; an archive has none. OpenPAI's login in `config` replaces the stored one.

        Raises:
            UserError: the experiment does not exist, it runs, its trials run a command and no function, or the login is unusable.
            RetryableError: the manager died during the wait.
        """
        if not isinstance(self, Experiment):
            check_id(self)
            found = Experiment(id=self)
            found.resume(port, wait_completion, debug, objective=objective)
            return found
        return self._and_wait(lambda: self._resume(port, debug, objective), wait_completion)

    @overload
    def view(  # type: ignore[misc]  # Experiment.view("ID"), as NNI v2 has it
        self: str, port: Port = "auto", non_blocking: bool = False
    ) -> Experiment: ...

    @overload
    def view(self, port: Port = "auto", non_blocking: bool = False) -> Experiment: ...

    def view(
        self: Experiment | str | None = None, port: Port = "auto", non_blocking: bool = False
    ) -> Experiment:
        """Serve a stored experiment read-only until Ctrl-C, or, with `non_blocking`, until `stop`.

        Raises:
            UserError: the experiment does not exist, it runs, or the port is in use.
        """
        if not isinstance(self, Experiment):
            check_id(self)
            return Experiment(id=self).view(port, non_blocking)
        folder = self._stored().folder
        with in_python_terms():
            ports = ports_from(port, count=1)
            known = self._launch(
                RunMode.Background,
                partial(
                    manager_process.start_view,
                    folder,
                    ports,
                    web_server(self.url_prefix, self.tls_certificate, self.tls_key),
                ),
            )
        if not non_blocking:
            try:
                manager_stop.wait_for_view(known)
            except KeyboardInterrupt:
                output.warning(f"Ctrl-C: ending the view of experiment {self.id}")
            finally:
                self.stop()
        return self

    def run_or_resume(
        self,
        port: Port = "auto",
        wait_completion: bool = True,
        debug: bool = False,
        *,
        objective: Function | None = None,
    ) -> bool | None:
        """Resume the experiment of this id if there is one, otherwise run a new one; returns the result of `run`.

        Raises:
            ConfigInvalid, UserError, RetryableError: see `run`.
        """
        how = self.resume if self.has_checkpoint() else self.run
        return how(port, wait_completion, debug, objective=objective)

    def has_checkpoint(self) -> bool:
        """True if the experiment of this id has stored data."""
        return any(
            folder.experiment_id == self.id and folder.has_database() for folder in Registry.of_user().all()
        )

    def load_checkpoint(self) -> None:
        """Check that the experiment is stored and does not run; `resume` loads the data itself.

        Raises:
            UserError: it is not stored, or it runs.
        """
        self._stored()

    # ---- private

    def _stored(self) -> KnownExperiment:
        """The stored experiment of this id.

        Raises:
            UserError: the experiment does not exist, or it runs.
        """
        check_id(self.id)
        known = known_by_id(str(self.id))
        if known.manager is not None and not known.manager_is_frozen():
            raise UserError(
                f"cannot resume or view experiment {known.experiment_id}: it runs; "
                f"Experiment.connect({known.manager.port}) finds it"
            )
        return known

    def _resume(self, port: Port, debug: bool, objective: Function | None) -> None:
        known = self._stored()
        check_start(port)
        made = None if objective is None else ObjectiveFunction.of(objective)
        if known.view is not None:
            manager_stop.end_view(known)
        with in_python_terms():
            store_login(known, self._config)
            if made is not None:
                made.store_again(known)
            ports = ports_from(port)
            start = partial(
                manager_process.start_manager,
                known.folder,
                ports,
                debug,
                web_server(self.url_prefix, self.tls_certificate, self.tls_key),
            )
            self._launch(RunMode.Background, start)

    def _launch(self, run_mode: RunMode, start: Callable[..., KnownExperiment]) -> KnownExperiment:
        """Start a manager or a view. Except with `RunMode.Detach`, it ends when this process ends."""
        pipe = None if run_mode is RunMode.Detach else ParentDeathPipe()
        try:
            known = start(parent_death_pipe=pipe)
        except BaseException:
            if pipe is not None:
                pipe.cut()
            raise
        server = known.manager or known.view
        assert server is not None  # `start` returned it
        self.id, self.port, self._folder = known.experiment_id, server.port, known.folder
        self._is_stopping = False
        self._pid = os.getpid()
        self._parent_death_pipe = pipe
        if pipe is not None:
            pipe.hand_over()
            atexit.register(self._stop_what_it_started)
        if run_mode is RunMode.Foreground:
            self._log = LogTail(known.folder.manager_log)
        with self._messages():
            output.info(f"Experiment {self.id} is served at {api_url(server)}")
            print_links(known.experiment_id, server)
        return known

    def _messages(self) -> contextlib.AbstractContextManager[None]:
        """Stdout is the script's own."""
        return output.messages_on(sys.stderr if self.verbose else None)

    def _stop_what_it_started(self) -> None:
        # Do not wait again if a previous stop was interrupted. A forked child process has not started the experiment.
        if self._parent_death_pipe is not None and not self._is_stopping and os.getpid() == self._pid:
            self.stop()

    def _release(self) -> None:
        atexit.unregister(self._stop_what_it_started)
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._parent_death_pipe is not None:
            self._parent_death_pipe.cut()
            self._parent_death_pipe = None
        manager_process.reap()
        self.port = None

    def _and_wait(self, begin: Callable[[], None], wait_completion: bool) -> bool | None:
        try:
            begin()
            return self.wait() if wait_completion else None
        except KeyboardInterrupt:
            if self._folder is None or self.port is None:
                raise  # the experiment has not started
            output.warning(f"Ctrl-C: stopping experiment {self.id}")
            self.stop()
            return None
