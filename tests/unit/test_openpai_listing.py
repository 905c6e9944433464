"""OpenPAI's job list: filters, order and pages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openpai_pictures import a_summary

from nni_manager.local_openpai.core.states import SubState
from nni_manager.local_openpai.errors import ApiError
from nni_manager.local_openpai.listing import MAX_LIMIT, listed
from nni_manager.local_openpai.response_bodies import list_item

JOBS = [
    list_item(job)
    for job in (
        a_summary(name="c", submitted_at_s=3, tags=("x", "y"), completed_at_s=9, total_gpus=2),
        a_summary(
            name="b", submitted_at_s=2, user="bob", sub_state=SubState.ATTEMPT_RUNNING, priority="prod"
        ),
        a_summary(name="a", submitted_at_s=1, virtual_cluster="big", tags=("y",), completed_at_s=5),
    )
]


def names(**query):
    answer = listed(query, JOBS)
    return "".join(item["name"] for item in answer)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({}, "cba"),
        ({"username": "bob"}, "b"),
        ({"username": "bob,ada"}, "cba"),
        ({"username": ""}, ""),
        ({"vc": "big"}, "a"),
        ({"state": "RUNNING,STOPPED"}, "b"),
        ({"state": "NONSENSE"}, ""),
        ({"jobPriority": "prod"}, "b"),
        ({"jobPriority": "default"}, "ca"),
        # The keyword is a part of the name of job b, and of the virtual cluster "big" of job a.
        ({"keyword": "b"}, "ba"),
        ({"keyword": "B"}, ""),
        ({"tagsContain": "x,z"}, "c"),
        ({"tagsContain": "y"}, "ca"),
        ({"tagsNotContain": "x,z"}, "ba"),
        ({"tagsContain": "y", "tagsNotContain": "x"}, "a"),
        ({"username": "ada", "vc": "default", "state": "WAITING"}, "c"),
        ({"offset": "1"}, "ba"),
        ({"limit": "2"}, "cb"),
        ({"offset": "1", "limit": "1"}, "b"),
        ({"limit": "0"}, ""),
        ({"offset": "7"}, ""),
        ({"order": "jobName,ASC"}, "abc"),
        ({"order": "submissionTime,ASC"}, "abc"),
        ({"order": "username,DESC"}, "bca"),
        ({"order": "vc,ASC"}, "acb"),
        ({"order": "totalGpuNumber,DESC"}, "cba"),
        ({"order": "state,ASC"}, "bca"),
        # Job b has not finished. In ascending order, it comes last.
        ({"order": "completionTime,ASC"}, "acb"),
        ({"order": "completionTime,DESC"}, "bca"),
        ({"unknown": "1"}, "cba"),
    ],
)
def test_a_query_selects_and_orders_the_listed_jobs(query, found):
    assert names(**query) == found


def test_the_total_count_includes_all_pages():
    answer = listed({"withTotalCount": "true", "limit": "1", "username": "ada"}, JOBS)
    assert (answer["totalCount"], [item["name"] for item in answer["data"]]) == (2, ["c"])


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"limit": str(MAX_LIMIT + 1)}, "Limit exceeds max number 50000."),
        ({"limit": "-1"}, "cannot use limit=-1; use a whole number"),
        ({"offset": "x"}, "cannot use offset=x; use a whole number"),
        ({"offset": "٣"}, "cannot use offset=٣"),
        ({"offset": "9" * 5000}, "cannot use offset=999"),
        ({"limit": "1.5"}, "cannot use limit=1.5"),
        ({"order": "jobname,ASC"}, 'cannot order by "jobname"; did you mean jobName?'),
        ({"order": "jobName"}, "cannot use order=jobName,; use jobName,ASC or jobName,DESC"),
        ({"order": "jobName,asc"}, "use jobName,ASC or jobName,DESC"),
    ],
)
def test_an_invalid_query_is_refused_with_a_remedy(query, words):
    with pytest.raises(ApiError) as caught:
        listed(query, [])
    assert (caught.value.code, caught.value.status) == ("InvalidParametersError", 400)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


ITEMS = st.lists(
    st.builds(
        lambda number, user, done, gpus, tags: list_item(
            a_summary(
                name=f"j{number}",
                user=user,
                completed_at_s=done,
                total_gpus=gpus,
                tags=tuple(tags),
                submitted_at_s=gpus,
            )
        ),
        st.integers(0, 10**6),
        st.sampled_from(["ada", "bob"]),
        st.none() | st.integers(0, 3),
        st.integers(0, 3),
        st.sets(st.sampled_from("xyz")),
    ),
    max_size=12,
    unique_by=lambda item: item["name"],
)
ORDERS = st.sampled_from(
    [f"{field},{way}" for field in ("submissionTime", "completionTime", "totalGpuNumber", "username", "jobPriority")
     for way in ("ASC", "DESC")]
)  # fmt: skip


@given(ITEMS, ORDERS, st.integers(1, 5))
def test_the_pages_of_a_list_contain_each_job_once_and_in_order(items, order, size):
    whole = listed({"order": order}, items)
    pages = [
        listed({"order": order, "offset": str(start), "limit": str(size)}, items)
        for start in range(0, len(items) + size, size)
    ]
    assert [item for page in pages for item in page] == whole
    assert sorted(item["name"] for item in whole) == sorted(item["name"] for item in items)


@given(ITEMS, st.sets(st.sampled_from("xyz"), min_size=1))
def test_every_job_matches_exactly_one_of_two_opposite_tag_filters(items, tags):
    words = ",".join(sorted(tags))
    has = listed({"tagsContain": words}, items)
    has_not = listed({"tagsNotContain": words}, items)
    assert sorted(item["name"] for item in has + has_not) == sorted(item["name"] for item in items)
    assert all(tags & set(item["tags"]) for item in has)
