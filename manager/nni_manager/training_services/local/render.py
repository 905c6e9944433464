"""A local job as data: the script that starts its keeper."""

import shlex


def render_run_script(python: str) -> str:
    """Returns run.sh: it starts the keeper with the manager's own Python, so their versions cannot differ."""
    return (
        "#!/bin/bash\n"
        "# Started once per job; the TRIAL_KEEPER_* variables say which trial it is for.\n"
        f"exec {shlex.quote(python)} -m trial_keeper\n"
    )
