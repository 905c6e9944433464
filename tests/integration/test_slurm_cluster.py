"""The Slurm cluster that the tests start: its two nodes run jobs, and no process outlives the cluster."""

from real_experiment import wait_until
from slurm_here import NODES, a_slurm_here

from trial_keeper import processes


def test_each_node_of_the_slurm_cluster_runs_jobs_and_no_process_outlives_the_cluster(tmp_path):
    with a_slurm_here() as slurm:
        for node in NODES:
            slurm.submit(
                f"hostname > {tmp_path / node}; sleep 100", f"--nodelist={node}", f"--job-name={node}"
            )
        wait_until(lambda: all((tmp_path / node).exists() for node in NODES), "a job runs on each node")
        assert slurm.states() == dict.fromkeys(NODES, "RUNNING")
        conf = slurm.variables.items()
    assert not [
        pid
        for pid in processes.pids_where(lambda environ: conf <= environ.items())
        if not processes.is_dead(pid)
    ]
