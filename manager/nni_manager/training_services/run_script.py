"""What run.sh does in every container: it enters the workspace, and finds the keeper that the container has."""

import shlex

from trial_keeper.exit_codes import KeeperExit

# Where images/keeper/Dockerfile puts it.
KEEPER_IN_IMAGES = "/opt/trial-keeper/bin/trial-keeper"


def finds_keeper(python: str | None = None) -> str:
    """Lines of bash after which `keeper` is the keeper's command, and the workspace the working directory.

    `python`: one that has the keeper, on machines where tasks are no containers.
    """
    own = (
        f"elif [ -x {shlex.quote(python)} ]; then keeper=({shlex.quote(python)} -m trial_keeper)\n"
        if python
        else ""
    )
    return f"""\
cd "${{BASH_SOURCE[0]%/*}}" || exit {int(KeeperExit.WORKSPACE)}
if [ -x {KEEPER_IN_IMAGES} ]; then keeper=({KEEPER_IN_IMAGES})
{own}elif command -v trial-keeper > /dev/null; then keeper=(trial-keeper)
else
  echo "trial-keeper: cannot find trial-keeper in this container; {KeeperExit.MISSING.remedy.replace("`", "")}" >&2
  exit {int(KeeperExit.MISSING)}
fi"""
