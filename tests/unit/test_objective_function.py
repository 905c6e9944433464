"""Objective functions in trials: how they are imported or pickled, and which modules are imported in advance."""

import collections
import functools
import json
import pickle
import sys
import traceback

import numpy
import pytest
from made_experiment import made_experiment
from yaml.loader import SafeLoader

from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.errors import UserError
from nni_manager.experiment import Experiment, ExperimentConfig
from nni_manager.experiment.objective import ObjectiveFunction
from nni_manager.store.registry import Registry
from nni_manager.training_services.platform import platform_of

MODULE = """\
import json
import numpy as np

def whole(parameters):
    return 1

def replaced(parameters):
    return 2

original, replaced = replaced, whole

class Model:
    @staticmethod
    def loss(parameters):
        return 3
"""
DATA = numpy.arange(3)


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "a_module_of_the_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    import a_module_of_the_user

    yield a_module_of_the_user
    del sys.modules["a_module_of_the_user"]


def through_a_helper(parameters):
    return helper(parameters) + DATA.sum()


def helper(parameters):
    return SafeLoader.get_data, [json for _ in parameters]


def test_a_function_reachable_by_its_qualified_name_is_imported_and_not_pickled(module):
    for function, name in ((module.whole, "whole"), (module.Model.loss, "Model.loss")):
        made = ObjectiveFunction.of(function)
        assert (made.name, made.pickled) == (f"a_module_of_the_user:{name}", None)
        # The module of the user imports json and numpy. The list must not contain the module itself.
        assert made.modules == ("json", "numpy")


@pytest.mark.parametrize(
    "of",
    [
        # The module uses the qualified name of this function for a different function, so an import would find the wrong one.
        lambda module: module.original,
        lambda module: lambda parameters: 4,
        lambda module: functools.partial(int, 5),
        lambda module: collections.Counter,
    ],
)
def test_a_callable_that_cannot_be_imported_is_pickled(module, of):
    function = of(module)
    made = ObjectiveFunction.of(function)
    if made.pickled is None:
        assert made.name == "collections:Counter"
        return
    assert made.modules[0] == "cloudpickle"
    copied = pickle.loads(made.pickled)  # noqa: S301 - this process has created the pickle
    assert callable(copied)


def test_tracebacks_of_a_copied_function_contain_the_file_name_and_the_source_lines():
    class Model:
        def divide(self, x):
            def inner():
                return 1 / x

            return inner()

    copied = pickle.loads(ObjectiveFunction.of(lambda parameters: Model().divide(0)).pickled)  # noqa: S301
    with pytest.raises(ZeroDivisionError) as raised:
        copied({})
    shown = traceback.extract_tb(raised.value.__traceback__)[1:]
    assert [(frame.filename, frame.name) for frame in shown] == [
        (__file__, name) for name in ("<lambda>", "divide", "inner")
    ]
    assert shown[-1].line == "return 1 / x"


async def asynchronous(parameters):
    return 1


class AsynchronousModel:
    async def __call__(self, parameters):
        return 1


@pytest.mark.parametrize(
    "function",
    [asynchronous, functools.partial(asynchronous), AsynchronousModel(), AsynchronousModel().__call__],
)
def test_an_asynchronous_function_is_refused_with_a_remedy(function):
    with pytest.raises(
        UserError, match=r"it is asynchronous.* lambda parameters: asyncio\.run\(FUNCTION\(parameters"
    ):
        ObjectiveFunction.of(function)


def test_a_pickled_function_lists_the_installed_modules_to_import_in_advance():
    made = ObjectiveFunction.of(lambda parameters: 1 + through_a_helper(parameters))
    assert set(made.modules) == {"cloudpickle", "numpy", "yaml.loader", "json"}


def test_an_objective_function_enables_job_reuse_and_warm_imports_by_default(module):
    made = ObjectiveFunction.of(module.whole)
    experiment = Experiment("local")
    experiment.config.warm_imports = ["decimal"]
    applied = made.applied_to(experiment.config)
    assert applied.training_service.reuse_mode is True
    assert applied.warm_imports == ["nni_sdk.objective", "json", "numpy", "decimal"]
    assert experiment.config.training_service.reuse_mode is None, "the user's own configuration is unchanged"
    assert experiment.config.trial_command is None

    experiment.config.training_service.reuse_mode, experiment.config.warm_imports = False, None
    applied = made.applied_to(experiment.config)
    assert (applied.training_service.reuse_mode, applied.warm_imports) == (False, None)
    with pytest.raises(ConfigInvalid, match="search_space"):
        applied.checked()
    experiment.config.training_service.reuse_mode, experiment.config.warm_imports = True, "numpy"
    with pytest.raises(ConfigInvalid, match=r"config.warm_imports: .* is not a list of module names"):
        made.applied_to(experiment.config).checked()


def test_the_offline_check_of_an_objective_function_accepts_a_script_in_the_code_folder(module, tmp_path):
    (tmp_path / "train.py").write_text("the script of the user, such as the one that calls search()")
    config = ExperimentConfig(
        "local", search_space={"x": {"_type": "uniform", "_value": [0, 1]}}, max_trial_number=1
    )
    config.trial_concurrency = 1
    platform_of(ObjectiveFunction.of(module.whole).applied_to(config).checked()).check_offline()


def test_an_objective_function_is_refused_if_it_is_combined_with_annotations_or_a_command(module):
    made = ObjectiveFunction.of(module.whole)
    for name, value in (("trial_command", "python3 train.py"), ("use_annotation", True)):
        experiment = Experiment("local")
        setattr(experiment.config, name, value)
        with pytest.raises(UserError, match=f"cannot use {name} = {value!r} together with an objective"):
            made.applied_to(experiment.config)


def test_an_experiment_with_a_trial_command_cannot_resume_with_a_function(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = made_experiment(tmp_path, 3).folder
    Registry.of_user().add(folder)
    with pytest.raises(
        UserError, match=r"with the function builtins:len: its trials run the command .*; omit objective"
    ):
        Experiment.resume(folder.experiment_id, objective=len)
    assert not folder.objective.exists()
