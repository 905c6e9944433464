"""The command line of `make bench`, its result files and their comparison. These tests measure nothing."""

import json

import pytest


@pytest.fixture
def bench(benchmark_module):
    return benchmark_module("run")


@pytest.fixture
def rows_of(bench):
    """Make rows with these ratios."""

    def make(*ratios):
        return [
            bench.Row(f"row {n}", "5 ms", "2 ms", f"{ratio} x", "<= 3 x", True)
            for n, ratio in enumerate(ratios)
        ]

    return make


def results_of(bench, *rounds, **machine):
    return bench.Results(machine, list(rounds))


def test_the_help_lists_every_measurement(bench, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"  {measure.__name__} " in shown for measure in bench.MEASUREMENTS)


def test_the_bench_command_runs_the_named_measurements_in_rounds(bench, monkeypatch, tmp_path, capsys):
    called = []

    def measure(name, holds):
        return lambda: [called.append(name), bench.Row(name, "5 ms", "2 ms", "2.5 x", "<= 3 x", holds)][1:]

    for name in ("ingest", "listing"):
        monkeypatch.setitem(bench.BY_NAME, name, measure(name, holds=name == "ingest"))
    file = tmp_path / "file.json"
    assert bench.main(["ingest", "--rounds", "2", "--json", str(file)]) == 0
    assert called == ["ingest"] * 2
    assert "fsync" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert [[row["figure"] for row in rows] for rows in document["rounds"]] == [[2.5], [2.5]]
    assert {"processor", "cores", "memory_gb", "python", "load_average"} <= document["machine"].keys()
    assert bench.main(["listing", "ingest"]) == 1


@pytest.mark.parametrize("arguments", [["speed"], ["--rounds", "0"]])
def test_the_error_for_an_invalid_argument_lists_the_choices(bench, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert ("decode_cost" in capsys.readouterr().err) or arguments[0] == "--rounds"


@pytest.mark.parametrize(
    ("measured", "ratio", "figure"),
    [
        ("5.0 ms", "2.59 x", 2.59),
        ("62,356 records/s", "-", 62356.0),
        ("+1.05 ms", "+3.2 ms", 1.05),
        ("9 ms", "1.5 x the fork, 0.9 x Ray Tune (1.2)", 9.0),
        ("-", "-", None),
    ],
)
def test_a_benchmark_row_is_compared_by_its_ratio_or_by_its_measured_value_if_it_has_no_ratio(
    bench, measured, ratio, figure
):
    assert bench.Row("it", measured, "-", ratio, "-", True).figure == figure


def test_a_benchmark_row_counts_as_changed_only_if_all_rounds_agree(bench, rows_of, tmp_path, capsys):
    before = [rows_of(2.0, 2.0, 2.0), rows_of(2.2, 2.0, 2.0), rows_of(1.9, 2.0, 2.0)]
    after = [rows_of(1.0, 1.9, 4.0), rows_of(1.2, 2.1, 4.1), rows_of(1.1, 1.8, 5.0)]
    files = [tmp_path / "before.json", tmp_path / "after.json"]
    results_of(bench, *before, python="3.11", cores=2).write(files[0])
    results_of(bench, *after, python="3.12", cores=2).write(files[1])
    assert bench.main(["--compare", *map(str, files)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rsplit("  ", 1)[1].strip() for line in lines[2:5]] == ["lower", "within the noise", "higher"]
    assert lines[2].split("  ")[1].strip() == "2 (1.9 to 2.2)"
    assert lines[5:] == ["python: 3.11 -> 3.12"]


def test_two_rounds_are_too_few_for_a_comparison(bench, rows_of):
    results = [results_of(bench, *[rows_of(number)] * 2) for number in (1.0, 9.0)]
    assert bench.results.compare(*results).endswith("too few rounds")


@pytest.mark.parametrize(
    "content", [None, "no JSON", "[]", '{"machine": {}}', '{"machine": {}, "rounds": [[{}]]}']
)
def test_a_file_without_valid_results_is_refused_with_the_remedy(bench, content, tmp_path, capsys):
    file = tmp_path / "other.json"
    if content is not None:
        file.write_text(content)
    assert bench.main(["--compare", str(file), str(file)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"cannot read {file}: ")
    assert f"make bench JSON={file}" in shown
