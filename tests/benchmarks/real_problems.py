"""Hyper-parameters of scikit-learn models on data that scikit-learn ships, and their cross-validated errors.

As a program, it trains each model with random parameters, and writes a table per problem into `problems/`. Arguments select
problems by name. All problems together take an hour. `tuner_problems` measures tuners on models that are fitted to these tables.
"""

import csv
import math
import statistics
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

PROBLEMS = Path(__file__).parent / "problems"
EVALUATIONS = 450
# For a noisy problem, this many parameter sets are trained twice, with different seeds. The noise is computed from the difference
# between the two errors of each set.
REPEATED = 40
FOLDS = 3
# Data sets are cut to this number of samples, so that one training takes a tenth of a second.
MAX_SAMPLES = 300
# Larger errors are replaced by this value, because the error 1 - R² of a diverging regression is unbounded.
MAX_ERROR = 10.0

Parameters = dict[str, Any]


@dataclass(frozen=True)
class Problem:
    """`space` is in NNI's format. `make(parameters, seed)` returns the untrained model. `data` names a loader of
    `sklearn.datasets`.
    """

    data: str
    space: dict[str, Any]
    make: Callable[[Parameters, int], Any]
    is_noisy: bool = False
    """True if a tuner sees the noise of training."""
    lost_from: float = math.inf
    """A trial whose error reaches this value fails, like a training that checks its result and detects a divergence."""


def _kind(name: str, *values: Any) -> dict[str, Any]:
    return {"_type": name, "_value": list(values)}


def _choice(*options: Any) -> dict[str, Any]:
    return _kind("choice", *options)


def _log(low: float, high: float) -> dict[str, Any]:
    return _kind("loguniform", low, high)


def _option(name: str, **parameters: Any) -> dict[str, Any]:
    return {"_name": name, **parameters}


def _inner(option: Parameters) -> Parameters:
    """The parameters of a nested option, without the option's `_name`."""
    return {name: value for name, value in option.items() if name != "_name"}


def _scaled(model: Any, scaling: str = "standard") -> Any:
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    return make_pipeline({"standard": StandardScaler, "minmax": MinMaxScaler}[scaling](), model)


def _svm(at: Parameters, _: int) -> Any:
    from sklearn.svm import SVC

    return _scaled(SVC(C=at["C"], gamma=at["gamma"], class_weight=at["class_weight"]), at["scaling"])


def _svm_kernels(at: Parameters, _: int) -> Any:
    from sklearn.svm import SVC

    kernel = at["kernel"]
    return _scaled(
        SVC(kernel=kernel["_name"], class_weight=at["class_weight"], max_iter=5000, **_inner(kernel))
    )


def _svr(at: Parameters, _: int) -> Any:
    from sklearn.svm import SVR

    kernel = at["kernel"]
    return _target_scaled(SVR(kernel=kernel["_name"], max_iter=5000, **_inner(kernel)))


def _target_scaled(model: Any) -> Any:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.preprocessing import StandardScaler

    return TransformedTargetRegressor(_scaled(model), transformer=StandardScaler())


def _mlp(at: Parameters, seed: int) -> Any:
    from sklearn.neural_network import MLPClassifier

    return _scaled(
        MLPClassifier(
            hidden_layer_sizes=(int(at["hidden"]),) * at["layers"],
            learning_rate_init=at["lr"],
            alpha=at["alpha"],
            activation=at["activation"],
            batch_size=at["batch"],
            max_iter=12,
            random_state=seed,
        )
    )


def _mlp_solvers(at: Parameters, seed: int) -> Any:
    from sklearn.neural_network import MLPClassifier

    solver = at["solver"]
    return _scaled(
        MLPClassifier(
            hidden_layer_sizes=(int(at["hidden"]),),
            alpha=at["alpha"],
            activation=at["activation"],
            solver=solver["_name"],
            max_iter=solver.get("max_iter", 15),
            batch_size=16,
            random_state=seed,
            **{name: value for name, value in _inner(solver).items() if name != "max_iter"},
        )
    )


def _forest(at: Parameters, seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(random_state=seed, **at)


def _boosting(at: Parameters, seed: int) -> Any:
    from sklearn.ensemble import GradientBoostingRegressor

    loss = at["loss"]
    others = {name: value for name, value in at.items() if name not in ("loss", "n_estimators")}
    return GradientBoostingRegressor(
        loss=loss["_name"], n_estimators=int(at["n_estimators"]), random_state=seed, **_inner(loss), **others
    )


def _adaboost(at: Parameters, seed: int) -> Any:
    from sklearn.ensemble import AdaBoostClassifier
    from sklearn.tree import DecisionTreeClassifier

    tree = DecisionTreeClassifier(
        max_depth=at["max_depth"], max_features=at["max_features"], random_state=seed
    )
    return AdaBoostClassifier(
        tree, n_estimators=int(at["n_estimators"]), learning_rate=at["learning_rate"], random_state=seed
    )


def _elastic_net(at: Parameters, _: int) -> Any:
    from sklearn.linear_model import ElasticNet
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    model = ElasticNet(alpha=at["alpha"], l1_ratio=at["l1_ratio"], max_iter=300, selection="cyclic")
    return _scaled(make_pipeline(PolynomialFeatures(at["degree"]), model), at["scaling"])


def _tree(at: Parameters, seed: int) -> Any:
    from sklearn.tree import DecisionTreeClassifier

    return DecisionTreeClassifier(random_state=seed, **at)


def _sgd(at: Parameters, seed: int) -> Any:
    from sklearn.linear_model import SGDClassifier

    rate, penalty = at["rate"], at["penalty"]
    return _scaled(
        SGDClassifier(
            loss=at["loss"],
            penalty=penalty["_name"],
            alpha=at["alpha"],
            learning_rate=rate["_name"],
            max_iter=8,
            random_state=seed,
            **_inner(penalty),
            **_inner(rate),
        )
    )


def _model(at: Parameters, seed: int) -> Any:
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsClassifier
    from sklearn.svm import SVC

    model = at["model"]
    make: dict[str, Callable[..., Any]] = {
        "svm": SVC,
        "forest": lambda **inner: RandomForestClassifier(n_estimators=20, random_state=seed, **inner),
        "neighbours": KNeighborsClassifier,
        "logistic": lambda **inner: LogisticRegression(max_iter=200, **inner),
    }
    return _scaled(make[model["_name"]](**_inner(model)), at["scaling"])


_C, _GAMMA, _DEGREE = _log(1e-3, 1e3), _log(1e-5, 10), _kind("randint", 2, 6)
_COEF0, _EPSILON = _kind("uniform", -1, 1), _log(1e-3, 2)
_ETA, _ALPHA = _log(1e-5, 10), _log(1e-7, 1)

REAL_PROBLEMS = {
    "SVM, digits": Problem(
        "digits",
        {
            "C": _C,
            "gamma": _GAMMA,
            "scaling": _choice("standard", "minmax"),
            "class_weight": _choice(None, "balanced"),
        },
        _svm,
    ),
    "SVM kernels, cancer": Problem(
        "breast_cancer",
        {
            "kernel": _choice(
                _option("linear", C=_C),
                _option("rbf", C=_C, gamma=_GAMMA),
                _option("poly", C=_C, gamma=_GAMMA, degree=_DEGREE, coef0=_COEF0),
                _option("sigmoid", C=_C, gamma=_GAMMA, coef0=_COEF0),
            ),
            "class_weight": _choice(None, "balanced"),
        },
        _svm_kernels,
    ),
    "SVR, diabetes": Problem(
        "diabetes",
        {
            "kernel": _choice(
                _option("linear", C=_C, epsilon=_EPSILON),
                _option("rbf", C=_C, epsilon=_EPSILON, gamma=_GAMMA),
                _option("poly", C=_C, epsilon=_EPSILON, gamma=_GAMMA, degree=_DEGREE, coef0=_COEF0),
            )
        },
        _svr,
    ),
    "MLP, digits": Problem(
        "digits",
        {
            "lr": _log(1e-5, 1),
            "alpha": _log(1e-7, 10),
            "hidden": _kind("quniform", 8, 96, 8),
            "layers": _choice(1, 2, 3),
            "activation": _choice("relu", "tanh", "logistic"),
            "batch": _choice(8, 16, 32, 64),
        },
        _mlp,
    ),
    "MLP solvers, wine": Problem(
        "wine",
        {
            "solver": _choice(
                _option("sgd", learning_rate_init=_ETA, momentum=_kind("uniform", 0, 0.99)),
                _option("adam", learning_rate_init=_ETA, beta_1=_kind("uniform", 0, 0.99)),
                _option("lbfgs", max_iter=_kind("randint", 2, 60)),
            ),
            "alpha": _log(1e-6, 100),
            "hidden": _kind("qloguniform", 2, 64, 1),
            "activation": _choice("relu", "tanh", "logistic"),
        },
        _mlp_solvers,
        is_noisy=True,
        lost_from=0.55,
    ),
    "forest, digits": Problem(
        "digits",
        {
            "n_estimators": _kind("randint", 3, 50),
            "max_depth": _kind("randint", 1, 16),
            "min_samples_leaf": _kind("randint", 1, 20),
            "min_samples_split": _kind("uniform", 0.001, 0.3),
            "max_features": _kind("uniform", 0.02, 1),
            "criterion": _choice("gini", "entropy"),
        },
        _forest,
    ),
    "boosting, diabetes": Problem(
        "diabetes",
        {
            "loss": _choice(
                _option("squared_error"),
                _option("absolute_error"),
                _option("huber", alpha=_kind("uniform", 0.5, 0.99)),
            ),
            "learning_rate": _log(0.003, 1),
            "n_estimators": _kind("qloguniform", 5, 80, 5),
            "max_depth": _kind("randint", 1, 7),
            "subsample": _kind("uniform", 0.2, 1),
            "max_features": _kind("uniform", 0.1, 1),
        },
        _boosting,
    ),
    "AdaBoost, wine": Problem(
        "wine",
        {
            "n_estimators": _kind("qloguniform", 2, 60, 2),
            "learning_rate": _log(0.003, 3),
            "max_depth": _kind("randint", 1, 7),
            "max_features": _kind("uniform", 0.08, 1),
        },
        _adaboost,
    ),
    "elastic net, diabetes": Problem(
        "diabetes",
        {
            "alpha": _log(1e-4, 100),
            "l1_ratio": _kind("uniform", 0, 1),
            "degree": _choice(1, 2, 3),
            "scaling": _choice("standard", "minmax"),
        },
        _elastic_net,
    ),
    "tree, cancer": Problem(
        "breast_cancer",
        {
            "max_depth": _kind("randint", 1, 20),
            "min_samples_leaf": _kind("randint", 1, 40),
            "min_samples_split": _kind("uniform", 0.001, 0.5),
            "max_features": _kind("uniform", 0.05, 1),
            "ccp_alpha": _log(1e-5, 0.3),
            "criterion": _choice("gini", "entropy"),
            "splitter": _choice("best", "random"),
        },
        _tree,
    ),
    "SGD, digits": Problem(
        "digits",
        {
            "loss": _choice("hinge", "log_loss", "modified_huber", "squared_error"),
            "penalty": _choice(
                _option("l2"), _option("l1"), _option("elasticnet", l1_ratio=_kind("uniform", 0, 1))
            ),
            "alpha": _ALPHA,
            "rate": _choice(
                _option("optimal"),
                _option("constant", eta0=_ETA),
                _option("invscaling", eta0=_ETA, power_t=_kind("uniform", 0, 1)),
                _option("adaptive", eta0=_ETA),
            ),
        },
        _sgd,
        is_noisy=True,
        lost_from=0.8,
    ),
    "choice of a model, cancer": Problem(
        "breast_cancer",
        {
            "model": _choice(
                _option("svm", C=_C, gamma=_GAMMA),
                _option(
                    "forest",
                    max_depth=_kind("randint", 1, 12),
                    min_samples_leaf=_kind("randint", 1, 20),
                    max_features=_kind("uniform", 0.05, 1),
                ),
                _option(
                    "neighbours",
                    n_neighbors=_kind("randint", 1, 40),
                    weights=_choice("uniform", "distance"),
                    p=_kind("uniform", 1, 4),
                ),
                _option("logistic", C=_C),
            ),
            "scaling": _choice("standard", "minmax"),
        },
        _model,
    ),
}


def file_of(name: str) -> Path:
    """The table of a problem."""
    return PROBLEMS / f"{name.replace(', ', '-').replace(' ', '-')}.csv"


def flat(parameters: Parameters, above: str = "") -> dict[str, Any]:
    """The parameters as table columns. The column of a nested choice contains the name of the chosen option."""
    columns: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            columns |= {f"{above}{name}": value["_name"], **flat(_inner(value), f"{above}{name}.")}
        else:
            columns[f"{above}{name}"] = value
    return columns


def _shown(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def error_of(problem: Problem, parameters: Parameters, seed: int) -> float | None:
    """The cross-validated error, 1 - accuracy or 1 - R²; None if training diverges or is impossible."""
    from sklearn import datasets
    from sklearn.base import is_classifier
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score

    points, targets = getattr(datasets, f"load_{problem.data}")(return_X_y=True)
    chosen = np.random.default_rng(0).permutation(len(points))[:MAX_SAMPLES]
    model = problem.make(parameters, seed)
    splitter = (StratifiedKFold if is_classifier(model) else KFold)(FOLDS, shuffle=True, random_state=seed)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            scores = cross_val_score(model, points[chosen], targets[chosen], cv=splitter, error_score="raise")
        except (ValueError, FloatingPointError, OverflowError):
            return None
    error = 1 - float(scores.mean())
    return min(error, MAX_ERROR) if math.isfinite(error) else None


def tabulate(name: str) -> None:
    """Train the model of a problem with random parameters, and write the table of the problem. The last column is the error; it
    is empty if the training failed.
    """
    from made_tuner import made_tuner

    problem = REAL_PROBLEMS[name]
    tuner = made_tuner("Random", problem.space, seed=1)
    asked = [tuner.ask(key) for key in range(EVALUATIONS)]
    drawn = [each.parameters for each in asked]  # type: ignore[union-attr]
    # The seed determines the folds. A problem without noise uses one seed for all parameter sets, so that their errors can be
    # compared.
    seeds = range(EVALUATIONS) if problem.is_noisy else [0] * EVALUATIONS
    errors = [error_of(problem, each, seed) for each, seed in zip(drawn, seeds, strict=True)]
    repeated = drawn[:REPEATED] if problem.is_noisy else []
    again = [error_of(problem, each, 10**6 + seed) for seed, each in enumerate(repeated)]
    pairs = [
        (one, two) for one, two in zip(errors, again, strict=False) if one is not None and two is not None
    ]
    noise = statistics.median(abs(one - two) for one, two in pairs) / 0.954 if problem.is_noisy else 0.0
    rows = [flat(each) for each in drawn]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    PROBLEMS.mkdir(exist_ok=True)
    with file_of(name).open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, "error", f"noise {noise:.4g}"])
        for row, error in zip(rows, errors, strict=True):
            shown = [_shown(row[column]) if column in row else "" for column in columns]
            writer.writerow([*shown, "" if error is None else f"{error:.5g}"])
    least = min(error for error in errors if error is not None)
    print(f"{name}: least {least:.4g}, noise {noise:.3g}, lost {errors.count(None)}", flush=True)


if __name__ == "__main__":
    for chosen_name in sys.argv[1:] or REAL_PROBLEMS:
        tabulate(chosen_name)
