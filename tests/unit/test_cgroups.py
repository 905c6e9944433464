"""The control group of a process: how the keeper locates the group and reads its files, on machines and in containers of all
kinds.
"""

import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trial_keeper.host.cgroups import MemoryCgroup, TrialCgroup

V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "32 31 0:29 {top} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct"
V2_MOUNT = "41 31 0:38 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID_MOUNT = "41 31 0:38 {top} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
OTHER_MOUNTS = (
    "23 1 8:1 / / rw - ext4 /dev/sda1 rw\n31 23 0:28 / /sys/fs/cgroup ro shared:8 - tmpfs tmpfs ro,mode=755"
)
V1_CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2_EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"


@pytest.fixture
def a_machine(tmp_path):
    """Creates a root folder that contains the files of /proc/self and of the given control groups."""

    def make(cgroup, *mounts, groups):
        proc = tmp_path / "proc" / "self"
        proc.mkdir(parents=True)
        (proc / "cgroup").write_text(cgroup + "\n")
        (proc / "mountinfo").write_text("\n".join([OTHER_MOUNTS, *mounts]) + "\n")
        for path, files in groups.items():
            folder = tmp_path / path.lstrip("/")
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                (folder / name).write_text(content)
        return tmp_path

    return make


def v1(kills=0, limit=9223372036854771712, peak=1000):
    return {
        "memory.oom_control": V1_CONTROL.format(kills),
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.max_usage_in_bytes": f"{peak}\n",
    }


def v2(kills=0, limit="max", peak=1000):
    return {
        "memory.events": V2_EVENTS.format(kills),
        "memory.max": f"{limit}\n",
        "memory.peak": f"{peak}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "mounts", "groups"),
    [
        pytest.param(
            "5:cpu,cpuacct:/\n4:memory:/\n0::/",
            [V1_CPU_MOUNT.format(top="/"), V1_MOUNT.format(top="/")],
            {"/sys/fs/cgroup/memory": v1(7)},
            id="v1, in a container with a cgroup namespace",
        ),
        pytest.param(
            "4:memory:/docker/abc",
            [V1_MOUNT.format(top="/docker/abc")],
            {"/sys/fs/cgroup/memory": v1(7)},
            id="v1, in a container without one",
        ),
        pytest.param(
            "4:memory:/kubepods/pod1/abc",
            [V1_MOUNT.format(top="/")],
            {"/sys/fs/cgroup/memory": v1(1), "/sys/fs/cgroup/memory/kubepods/pod1/abc": v1(7)},
            id="v1, with the machine's whole hierarchy",
        ),
        pytest.param(
            "4:memory:/kubepods/pod1/abc",
            [V1_MOUNT.format(top="/elsewhere")],
            {"/sys/fs/cgroup/memory": v1(7)},
            id="v1, with a path that leads nowhere",
        ),
        pytest.param(
            "4:memory:/user/me\n0::/user/me",
            [V1_MOUNT.format(top="/"), HYBRID_MOUNT.format(top="/")],
            {"/sys/fs/cgroup/memory/user/me": v1(7), "/sys/fs/cgroup/unified/user/me": {"cgroup.procs": ""}},
            id="both, with memory in v1",
        ),
        pytest.param("0::/", [V2_MOUNT.format(top="/")], {"/sys/fs/cgroup": v2(7)}, id="v2, in a container"),
        pytest.param(
            "0::/system.slice/docker-abc.scope",
            [V2_MOUNT.format(top="/system.slice/docker-abc.scope")],
            {"/sys/fs/cgroup": v2(7)},
            id="v2, in a container without a cgroup namespace",
        ),
        pytest.param(
            "0::/user.slice/user-1.slice/a b",
            [V2_MOUNT.format(top="/")],
            {"/sys/fs/cgroup": v2(1), "/sys/fs/cgroup/user.slice/user-1.slice/a b": v2(7)},
            id="v2, on a machine",
        ),
        pytest.param(
            r"0::/getty@\x2d.slice",
            [V2_MOUNT.format(top=r"/getty@\134x2d.slice")],
            {"/sys/fs/cgroup": v2(7)},
            id="v2, with a name that systemd has escaped",
        ),
        pytest.param(
            "0::/../sibling",
            [V2_MOUNT.format(top="/../..")],
            {"/sys/fs/cgroup": v2(7), "/sys/fs/sibling": v2(1)},
            id="v2, seen from another namespace",
        ),
    ],
)
def test_a_process_finds_its_own_control_group(a_machine, cgroup, mounts, groups):
    memory = MemoryCgroup.own(a_machine(cgroup, *mounts, groups=groups))
    assert memory is not None
    assert memory.oom_kills() == 7
    assert memory.limit_bytes() is None
    assert memory.peak_bytes() == 1000


@pytest.mark.parametrize(
    ("cgroup", "mounts", "groups"),
    [
        ("", [], {}),
        ("0::/", [], {}),
        ("4:memory:/", [V1_CPU_MOUNT.format(top="/")], {"/sys/fs/cgroup/cpu": v1(7)}),
        # In this case, the process is in the root group of a machine, which has no memory counters.
        ("0::/", [V2_MOUNT.format(top="/")], {"/sys/fs/cgroup": {"cgroup.procs": ""}}),
        ("4:pids:/", [V1_MOUNT.format(top="/")], {"/sys/fs/cgroup/memory": v1(7)}),
    ],
)
def test_no_control_group_is_returned_if_memory_counters_are_missing(a_machine, cgroup, mounts, groups):
    assert MemoryCgroup.own(a_machine(cgroup, *mounts, groups=groups)) is None


WORDS = st.sampled_from(
    ["0", "4", ":", "memory", "/", "..", " ", "\n", " - ", "cgroup", "cgroup2", "rw", "\\134", ","]
)


@given(cgroup=st.lists(WORDS).map("".join), mounts=st.lists(WORDS).map("".join))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arbitrary_content_of_proc_files_raises_no_error(tmp_path_factory, cgroup, mounts):
    root = tmp_path_factory.mktemp("root")
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    (root / "proc" / "self" / "mountinfo").write_text(mounts)
    assert MemoryCgroup.own(root) is None
    assert TrialCgroup.around(7, root) is None


@pytest.mark.parametrize("root", ["no", "proc"])
def test_no_control_group_is_returned_if_the_files_of_proc_are_missing(tmp_path, root):
    assert MemoryCgroup.own(tmp_path / root) is None
    assert TrialCgroup.around(os.getpid(), tmp_path / root) is None


def test_the_lowest_memory_limit_of_a_group_and_its_parents_applies(a_machine):
    groups = {
        "/sys/fs/cgroup": {},
        "/sys/fs/cgroup/pod": v2(limit=512 << 20),
        "/sys/fs/cgroup/pod/container": v2(limit=1 << 30),
    }
    memory = MemoryCgroup.own(a_machine("0::/pod/container", V2_MOUNT.format(top="/"), groups=groups))
    assert memory.limit_bytes() == 512 << 20


def test_the_memory_limit_of_cgroup_v1_is_read(a_machine):
    root = a_machine(
        "4:memory:/", V1_MOUNT.format(top="/"), groups={"/sys/fs/cgroup/memory": v1(limit=96 << 20)}
    )
    assert MemoryCgroup.own(root).limit_bytes() == 96 << 20


def test_the_oom_kill_count_is_zero_and_the_peak_is_none_if_the_kernel_lacks_these_counters(a_machine):
    groups = {"/sys/fs/cgroup": {"memory.events": "low 0\n", "memory.max": "max\n"}}
    memory = MemoryCgroup.own(a_machine("0::/", V2_MOUNT.format(top="/"), groups=groups))
    assert (memory.oom_kills(), memory.limit_bytes(), memory.peak_bytes()) == (0, None, None)


KILLED = (
    ", and the kernel killed a process of the trial; "
    "request more memory in the experiment file or use a smaller batch"
)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (v2(limit=512 << 20), "the container's memory limit of 512 MiB was reached"),
        ({"memory.events": "low 0\n", "memory.max": "max\n"}, "the machine's memory was full"),
        (
            v2(peak=3 << 30),
            "the machine's memory was full (this container has used up to 3072 MiB of it)",
        ),
    ],
)
def test_the_message_for_a_memory_shortage_contains_the_limit_or_the_peak(a_machine, files, found):
    root = a_machine("0::/", V2_MOUNT.format(top="/"), groups={"/sys/fs/cgroup": files})
    assert MemoryCgroup.own(root).shortage() == found + KILLED


def test_no_control_group_is_created_in_the_root_group_of_a_machine(a_machine):
    root = a_machine("0::/", V2_MOUNT.format(top="/"), groups={"/sys/fs/cgroup": {"cgroup.procs": ""}})
    assert TrialCgroup.around(os.getpid(), root) is None
    assert [path.name for path in (root / "sys/fs/cgroup").iterdir()] == ["cgroup.procs"]


def test_no_control_group_is_returned_if_the_group_cannot_be_created(a_machine):
    root = a_machine("0::/", V2_MOUNT.format(top="/"), groups={"/sys/fs/cgroup": {"cgroup.kill": ""}})
    (root / "sys/fs/cgroup" / "trial-7").write_text("in the way")
    assert TrialCgroup.around(7, root) is None


def test_a_control_group_is_found_by_the_pid_of_its_first_process(a_machine):
    root = a_machine("0::/", V2_MOUNT.format(top="/"), groups={"/sys/fs/cgroup": {"cgroup.kill": ""}})
    assert TrialCgroup.of(7, root) is None
    assert TrialCgroup.around(7, root) is not None
    assert TrialCgroup.of(7, root) is not None
    assert TrialCgroup.of(8, root) is None
