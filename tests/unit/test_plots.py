"""The plots of trials, without a manager."""

from dataclasses import replace

import pytest

from nni_manager.errors import UserError
from nni_manager.experiment.data import TrialJob
from nni_manager.experiment.plots import Plots


def trial(number, value, violates=(), **parameters):
    job = TrialJob(f"t{number}", "SUCCEEDED", [], "", 0, 1, [], number, value, "", parameters)
    return replace(job, violates=[*violates])


def test_a_history_omits_trials_without_a_number_and_shows_the_best_result_so_far():
    trials = [
        trial(0, 2.0, x=1),
        trial(1, None, x=2),
        trial(2, float("nan"), x=2),
        trial(3, 3.0),
        trial(4, 1.0),
    ]
    for is_maximized, best in ((True, (2, 3, 3)), (False, (2, 2, 1))):
        results, so_far = Plots(trials, is_maximized=is_maximized).history().data
        assert (results.x, results.y, so_far.y) == ((0, 3, 4), (2, 3, 1), best)


def test_a_result_that_violates_a_constraint_is_not_the_best_of_a_history():
    trials = [trial(0, 3.0), trial(1, 1.0, ["size ≤ 5"]), trial(2, 2.0)]
    results, so_far, others = Plots(trials, is_maximized=False).history().data
    assert (results.x, results.y, so_far.y) == ((0, 2), (3, 2), (3, 2))
    assert (others.name, others.x, others.y) == ("violates a constraint", (1,), (1,))


def test_parallel_coordinates_have_axes_for_log_scales_and_choices_and_nested_parameters():
    trials = [
        trial(0, 1.0, kind="b", lr=0.001, layer={"size": 3}),
        trial(1, 2.0, kind="a", lr=1.0, layer={}),
        trial(2, 3.0, kind=[1, 2], lr=0.1),
    ]
    axes = {axis.label: axis for axis in Plots(trials, is_maximized=True).parallel().data[0].dimensions}
    assert list(axes) == ["result", "kind", "lr", "layer/size", "layer"]
    assert (axes["kind"].ticktext, axes["kind"].values) == (("[1, 2]", "a", "b"), (2, 1, 0))
    assert (axes["lr"].ticktext, axes["lr"].values) == (("1e-3", "1e-2", "1e-1", "1e0"), (-3, 0, -1))
    assert axes["layer/size"].values == (3, None, None)


def test_slice_plots_have_log_axes_for_powers_of_ten_and_categories_for_choices():
    trials = [
        trial(0, 1.0, kind="b", lr=0.001, n=1),
        trial(1, 2.0, kind=2, lr=1.0, n=2),
        trial(2, 3.0, n=True),
    ]
    figure = Plots(trials, is_maximized=True).slices()
    axes = [figure.layout.xaxis, figure.layout.xaxis2, figure.layout.xaxis3]
    assert [(axis.title.text, axis.type) for axis in axes] == [
        ("kind", "category"), ("lr", "log"), ("n", "category")
    ]  # fmt: skip
    assert [trace.x for trace in figure.data] == [("b", "2"), (0.001, 1.0), ("1", "2", "true")]
    assert figure.data[0].text == ("trial 0", "trial 1")


def both(number, *values):
    return TrialJob(f"t{number}", "SUCCEEDED", [], "", 0, 1, [], number, values[0], values=list(values))


@pytest.mark.parametrize(("is_maximized", "shape"), [(True, "vh"), (False, "hv")])
def test_the_pareto_front_is_a_step_line_ordered_by_the_first_objective(is_maximized, shape):
    trials = [both(0, 3.0, 1.0), both(1, 2.0, 5.0), both(2, 1.0, 2.0), trial(3, None)]
    plots = Plots(trials, is_maximized=is_maximized, objectives=("loss", "ms"), front={"t0", "t2"})
    others, front = plots.front().data
    assert (others.x, others.y, others.text, others.mode) == ((2,), (5,), ("trial 1",), "markers")
    assert (front.x, front.y, front.text) == ((1, 3), (2, 1), ("trial 2", "trial 0"))
    assert (front.mode, front.line.shape) == ("lines+markers", shape)
    layout = plots.front().layout
    assert (layout.xaxis.title.text, layout.yaxis.title.text) == ("loss", "ms")


def test_the_pareto_front_of_three_objectives_has_a_plot_for_each_pair():
    trials = [both(0, 3.0, 1.0, 9.0), both(1, 2.0, 5.0, 8.0)]
    plots = Plots(trials, is_maximized=False, objectives=("loss", "ms", "mb"), front={"t1"})
    others, front = plots.front().data
    assert [(axis.label, axis.values) for axis in others.dimensions] == [
        ("loss", (3,)),
        ("ms", (1,)),
        ("mb", (9,)),
    ]
    assert [axis.values for axis in front.dimensions] == [(2,), (5,), (8,)]
    with pytest.raises(UserError, match=r"cannot plot the Pareto front of one objective; plot_history\(\)"):
        Plots(trials, is_maximized=False, objectives=("loss",)).front()


def test_the_importance_plot_shows_the_highest_importance_at_the_top():
    (bars,) = Plots([], is_maximized=True).importances({"x": 0.75, "net/size": 0.25}).data
    assert [*zip(bars.y, bars.x, strict=True)] == [("net/size", 0.25), ("x", 0.75)]
