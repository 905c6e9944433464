"""A local job as data: the script that starts its keeper."""

import shlex


def render_run_script(python: str) -> str:
    """Returns run.sh, which starts the keeper with the manager's own Python, so that their versions are equal."""
    return (
        "#!/bin/bash\n"
        "# Started once per job; the TRIAL_KEEPER_* variables are the keeper's settings.\n"
        f"exec {shlex.quote(python)} -m trial_keeper\n"
    )
