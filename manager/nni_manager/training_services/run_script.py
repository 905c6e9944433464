"""The common part of run.sh: enters the workspace and finds the container's keeper."""

import shlex
from pathlib import Path

from nni_manager.support.keeper_bundle import DIGEST_CHARACTERS, KeeperBundle
from trial_keeper import __version__
from trial_keeper.exit_codes import KeeperExit

_MAJOR_MINOR = ".".join(__version__.split(".")[:2])
# The path in images/keeper/Dockerfile.
_IN_IMAGES = "/opt/trial-keeper"
KEEPER_IN_IMAGES = f"{_IN_IMAGES}/bin/trial-keeper"
_DAMAGED, _NO_ROOM = int(KeeperExit.WORKSPACE), int(KeeperExit.MISSING)
_UNPACKER = Path(__file__).with_name("keeper_unpacker.py")


def render_run_script(bundle: KeeperBundle | None = None, python: str | None = None) -> str:
    """The content of run.sh: it enters the workspace and execs the keeper. `python`, `bundle`: see `keeper_lookup_snippet`."""
    return f"""\
#!/bin/bash
# Started once per task; the TRIAL_KEEPER_* variables are the keeper's settings.
{keeper_lookup_snippet(python, bundle)}
exec "${{keeper[@]}}" "$@"
"""


def keeper_lookup_snippet(python: str | None = None, bundle: KeeperBundle | None = None) -> str:
    """Returns lines of bash that set `keeper` to the keeper's command and enter the workspace.

    `python`: an interpreter that has the keeper installed, for machines where tasks are not containers. `bundle`: the one whose
    archives are in the workspace; without it an image needs a keeper of its own.
    """
    lines = [f'cd "${{BASH_SOURCE[0]%/*}}" || exit {int(KeeperExit.WORKSPACE)}']
    if bundle is not None:
        lines.append(_functions(bundle))
        if bundle.is_preferred:
            return "\n".join([*lines, f"find_in_bundle || exit {int(KeeperExit.MISSING)}"])
        lines += ["if ! has_own_keeper && find_in_bundle; then :"]
    lines.append(
        f"{'if' if bundle is None else 'elif'} [ -x {KEEPER_IN_IMAGES} ]; then keeper=({KEEPER_IN_IMAGES})"
    )
    if python is not None:
        own = shlex.quote(python)
        lines.append(f"elif [ -x {own} ]; then keeper=({own} -m trial_keeper)")
    remedy = KeeperExit.MISSING.remedy.replace("`", "")
    lines.append(f"""\
elif command -v trial-keeper > /dev/null; then keeper=(trial-keeper)
else
  echo "trial-keeper: cannot find trial-keeper in this container; {remedy}" >&2
  exit {int(KeeperExit.MISSING)}
fi""")
    return "\n".join(lines)


def _functions(bundle: KeeperBundle) -> str:
    """The functions of bash that look for an own keeper whose version agrees, and for one in the bundle."""
    archives = {
        name: (f"keeper/{bundle.stored_name(name)}", digest) for name, digest in bundle.digests.items()
    }
    call = f"unpack({archives}, sys.argv[1:], {_DAMAGED}, {_NO_ROOM})"
    return f"""\
has_own_keeper() {{
  if [ -x {KEEPER_IN_IMAGES} ]; then
    compgen -G '{_IN_IMAGES}/lib/python3*/site-packages/trial_keeper-{_MAJOR_MINOR}.*' > /dev/null
  else
    [[ $(trial-keeper --version 2> /dev/null) = "trial-keeper {_MAJOR_MINOR}."* ]]
  fi
}}
{_digests(bundle)}
# The keeper is unpacked into a new folder of the first of these where programs may run.
parents=("${{TMPDIR:-/tmp}}" /dev/shm "$PWD/keeper/unpacked")
# Exits because of archive $2.
refuse() {{
  case $1 in
    {_DAMAGED}) echo "trial-keeper: $PWD/$2 is missing or damaged; run nnictl resume to write it again" ;;
    *) echo "trial-keeper: cannot unpack $2: none of ${{parents[0]}}, ${{parents[1]}} and ${{parents[2]}} is writable, allows" \\
      "programs and has 70 MB free; mount an emptyDir at /tmp" ;;
  esac >&2
  exit "$1"
}}
unpack_frozen() {{
  local digest archive parent found
  digest=$(digest_of "$1")
  archive=keeper/$1-${{digest:0:{DIGEST_CHARACTERS}}}.tar
  for parent in "${{parents[@]}}"; do
    folder=$(mktemp -d "$parent/trial-keeper.XXXXXXXX" 2> /dev/null) || continue
    # The archive is read once: what is unpacked has this digest, even if somebody replaces the file meanwhile.
    found=$(
      exec 3>&1 2> /dev/null
      tee >(b2sum >&3) < "$archive" | tar -x -C "$folder" -f - > /dev/null
    ) && [ "${{found%% *}}" = "$digest" ] && [ -x "$folder/trial-keeper" ] && return
    rm -rf "$folder"
  done
  [[ $(b2sum "$archive" 2> /dev/null) = "$digest "* ]] || refuse {_DAMAGED} "$archive"
  refuse {_NO_ROOM} "$archive"
}}
unpacker={_unpacker()}
find_in_bundle() {{
  local name=frozen-$(uname -m) python folder
  for python in python3 python; do
    folder=$("$python" -I -S -c "$unpacker"{shlex.quote(call)} "${{parents[@]}}" 2> /dev/null)
    case $? in
      0) keeper=("$python" -I -S "$folder"); return ;;
      {_DAMAGED} | {_NO_ROOM}) refuse $? "$folder" ;;
    esac
  done
  if [ -n "$(digest_of "$name")" ] && type tar b2sum > /dev/null 2>&1; then
    unpack_frozen "$name"
    keeper=("$folder/trial-keeper")
    "${{keeper[@]}}" --probe > /dev/null 2>&1 && return
    rm -rf "$folder"
  fi
  echo "trial-keeper: cannot run the keeper's bundle in this container: it needs {bundle.requirement}" >&2
  return 1
}}"""


def choice_snippet(bundle: KeeperBundle) -> str:
    """Lines of bash that define `digest_of ARCHIVE`, and `choose_archive`.

    The latter sets `name` to the archive that fits, and `python` to the interpreter that runs it, empty for a frozen keeper.
    It fails if no archive fits.
    """
    return f"""\
{_digests(bundle)}
unpacker={_unpacker()}
choose_archive() {{
  for python in python3 python; do
    name=$("$python" -I -S -c "$unpacker"'print(archive_name())' 2> /dev/null) && [ -n "$(digest_of "$name")" ] && return
  done
  python='' name=frozen-$(uname -m)
  [ -n "$(digest_of "$name")" ] && type tar b2sum > /dev/null 2>&1
}}"""


def _digests(bundle: KeeperBundle) -> str:
    digests = "\n".join(f"    {name}) echo {digest} ;;" for name, digest in sorted(bundle.digests.items()))
    return f"""\
digest_of() {{
  case $1 in
{digests}
  esac
}}"""


def _unpacker() -> str:
    return shlex.quote(_UNPACKER.read_text())
