"""The peak resource usage of a trial."""

from attempts import attempt_id
from hypothesis import given
from hypothesis import strategies as st

from nni_manager.domain.usage import PeakUsage
from trial_keeper.wire.messages import AttemptKey, GpuUsage, Usage

KEY = AttemptKey("t0", attempt_id(0), "main-0")
FIGURES = st.floats(0, 1e6)
BYTES = st.integers(0, 2**63)
GPUS = st.dictionaries(st.integers(0, 3), st.tuples(FIGURES, BYTES)).map(
    lambda gpus: tuple(GpuUsage(index, *figures) for index, figures in gpus.items())
)
USAGES = st.lists(st.builds(Usage, st.just(KEY), FIGURES, BYTES, BYTES, GPUS), min_size=1)


def peak_of(usages: list[Usage]) -> PeakUsage:
    peak = PeakUsage()
    for usage in usages:
        peak = peak.merge_max(usage)
    return peak


@given(USAGES)
def test_the_peak_usage_of_a_resource_is_the_highest_sample(usages: list[Usage]) -> None:
    peak = peak_of(usages)
    assert peak.cpu_percent == max(usage.cpu_percent for usage in usages)
    assert peak.rss_bytes == max(usage.rss_bytes for usage in usages)
    assert peak.disk_bytes == max(usage.disk_bytes for usage in usages)
    seen = [gpu for usage in usages for gpu in usage.gpus]
    assert [gpu.index for gpu in peak.gpus] == sorted({gpu.index for gpu in seen})
    for gpu in peak.gpus:
        same = [other for other in seen if other.index == gpu.index]
        assert gpu.utilisation_percent == max(other.utilisation_percent for other in same)
        assert gpu.memory_used_bytes == max(other.memory_used_bytes for other in same)


@given(USAGES)
def test_a_repeated_usage_report_does_not_raise_the_peak(usages: list[Usage]) -> None:
    peak = peak_of(usages)
    assert all(peak.merge_max(usage) == peak for usage in usages)


@given(USAGES)
def test_peak_usage_survives_a_round_trip_through_json(usages: list[Usage]) -> None:
    peak = peak_of(usages)
    assert PeakUsage.from_json(peak.to_json()) == peak
