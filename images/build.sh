#!/usr/bin/env bash
# Builds an image: the wheels on this machine, the rest with podman or docker. Nothing in the build needs a network, except
# for the base image if it is not here yet.
#
# usage: images/build.sh keeper|manager TAG [BASE_IMAGE]
#
# BASE_IMAGE is python:3.11-slim unless given; for `keeper`, the image in which the training code runs. PYTHON is a Python
# of the base image's version with pip, python3 unless set. EXTRAS, such as tuners, is what else the manager is to have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}

complain() {
  echo "$1" >&2
  exit 1
}

case $#:${1-} in
  [23]:keeper)
    project=.
    unset EXTRAS
    ;;
  [23]:manager) project=".[manager,kubernetes${EXTRAS:+,$EXTRAS}]" ;;
  *) complain "cannot build '$*'; usage: images/build.sh keeper|manager TAG [BASE_IMAGE]" ;;
esac
image=$1
tag=$2
base=${3:-python:3.11-slim}
engine=$(command -v podman || command -v docker) || complain "cannot build images: there is no podman and no docker; install one"

# A wheel of grpcio fits one version of Python on one kind of machine, which this name stands for.
abi='import sysconfig; print(sysconfig.get_config_var("SOABI"))'
ours=$("$PYTHON" -c "$abi")
theirs=$("$engine" run --rm --network none --entrypoint python3 "$base" -c "$abi") ||
  complain "cannot use base image $base: it cannot be run, or has no python3; name another, or install Python 3.10 or later there"
[ "$ours" = "$theirs" ] ||
  complain "cannot make wheels for $base: its Python is $theirs, $PYTHON is $ours; set PYTHON to one like the image's"

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
# In a copy: setuptools would leave a build/ folder here, and take old files from one.
mkdir "$context/source"
cp -r pyproject.toml README.md LICENSE nni_sdk trial_keeper manager "$context/source"
(cd "$context/source" && "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --wheel-dir "$context/wheels" "$project" pip)
rm -rf "$context/source"
"$engine" build --file "images/$image/Dockerfile" --build-arg "BASE_IMAGE=$base" \
  ${EXTRAS:+--build-arg "EXTRAS=$EXTRAS"} --tag "$tag" "$context"
