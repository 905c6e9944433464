"""Loops for scikit-learn, which has no callbacks: passes of `partial_fit`, and the folds of a cross-validation.

Source: scikit-learn 0.22 and later, sklearn.model_selection.cross_val_score and scorers.
"""

import pickle
from itertools import islice

import numpy as np
from sklearn.base import is_classifier
from sklearn.metrics import get_scorer
from sklearn.model_selection import check_cv, cross_val_score

import nni_sdk
from nni_sdk.integrations.continued_training import ContinuedTraining
from nni_sdk.integrations.reporter import MetricReporter, is_first_process

TYPE_CHECKING = False  # importing typing costs more than the SDK; type checkers recognise this name
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any


class NNICallback:
    """Reports a score after each pass or fold, and the final result after the last; a stop ends the loop.

    `metric`: the name of a scorer of scikit-learn, such as `accuracy` or `neg_log_loss`, or a scorer. `best`: "min" or "max"
    makes the lowest or highest score of the passes the final result; None the last. The folds' final result is their mean.
    `checkpoints`: save one after each pass, by pickle; `passes` then restores the model and skips the passes of earlier attempts.

    Pickle stores every estimator, also one of the user's own class, and needs no package. A format such as that of skops needs a
    package and a list of trusted types. The digest of the file, which a keeper has signed, is verified before the file is loaded.

    Raises:
        MetricAbsent: scikit-learn has no such scorer.
    """

    def __init__(
        self, metric: "str | Callable[..., float]", best: "str | None" = None, *, checkpoints: bool = False
    ) -> None:
        self._saves_checkpoints = checkpoints
        self._name = metric if isinstance(metric, str) else getattr(metric, "__name__", "score")
        self._best = best
        reporter = self._reporter()
        try:
            self._scorer = get_scorer(metric)
        except ValueError as error:
            raise reporter.absent(_scorer_names()) from error

    def passes(self, iterable: "Iterable[Any]", model: "Any", x: "Any", y: "Any" = None) -> "Iterator[Any]":
        """Yield each item of `iterable`; after the loop's body, report the score of `model` on the validation data `x`, `y`.

        With checkpoints, items of the passes that earlier attempts have completed are skipped: each attempt must have the same.
        """
        reporter = self._reporter()
        reporter.report_final_result_at_exit()  # if the loop's body breaks
        training = ContinuedTraining(reporter, is_saved=self._saves_checkpoints)
        if training.model is not None:
            given = model.get_params() if training.is_inherited else {}
            with open(training.model, "rb") as file:
                vars(model).update(pickle.load(file))  # noqa: S301 - load_checkpoint has verified it
            # Estimators, also those in a list such as a pipeline's steps, are the fitted ones of the checkpoint.
            kept = {
                name: value
                for name, value in given.items()
                if not isinstance(value, list) and not hasattr(value, "get_params")
            }
            if kept:
                model.set_params(**kept)
        for each in islice(iterable, training.rounds, None):
            yield each
            if is_first_process():
                reporter.report({self._name: self._scorer(model, x, y)})
            training.round_ended(lambda path: _save(model, path))
            if nni_sdk.should_stop():
                break
        reporter.report_final_result()

    def cross_val_score(
        self,
        estimator: "Any",
        x: "Any",
        y: "Any" = None,
        *,
        groups: "Any" = None,
        cv: "Any" = None,
        **kwargs: "Any",
    ) -> "Any":
        """Return what scikit-learn's function of this name does, the scores of the folds; after a stop those of fewer folds.

        `scoring` is the callback's metric. `kwargs`: other arguments of that function.
        """
        reporter = self._reporter()
        scores = []  # type: list[float]
        for split in check_cv(cv, y, classifier=is_classifier(estimator)).split(x, y, groups):
            scores += list(cross_val_score(estimator, x, y, scoring=self._scorer, cv=[split], **kwargs))
            if is_first_process():
                reporter.report({self._name: scores[-1]})
            if nni_sdk.should_stop():
                break
        reporter.report_final_result(float(np.mean(scores)))
        return np.array(scores)

    def _reporter(self) -> MetricReporter:
        return MetricReporter(self._name, self._best)


def _save(model: "Any", path: str) -> None:
    with open(path, "wb") as file:
        pickle.dump(vars(model), file)


def _scorer_names() -> "list[str]":
    try:
        from sklearn.metrics import get_scorer_names
    except ImportError:  # before scikit-learn 1.0
        from sklearn.metrics import SCORERS

        return list(SCORERS)
    return list(get_scorer_names())
