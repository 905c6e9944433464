"""The common part of run.sh: enters the workspace and finds the container's keeper."""

import shlex

from trial_keeper.exit_codes import KeeperExit

# The path in images/keeper/Dockerfile.
KEEPER_IN_IMAGES = "/opt/trial-keeper/bin/trial-keeper"


def keeper_lookup_snippet(python: str | None = None) -> str:
    """Returns lines of bash that set `keeper` to the keeper's command and enter the workspace.

    `python`: an interpreter that has the keeper installed, for machines where tasks are not containers.
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
