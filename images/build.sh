#!/usr/bin/env bash
# Builds an image: the wheels on this machine, the rest with podman or docker. The build needs no network, except to pull a
# base image that is not on this machine yet.
#
# usage: images/build.sh keeper|manager TAG [BASE_IMAGE]
#
# BASE_IMAGE (default: python:3.11-slim) is, for `keeper`, the image in which the training code runs. PYTHON (default: python3)
# is a Python of the base image's version, with pip. EXTRAS names further extras of the manager, such as tuners.
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
engine=$(command -v podman || command -v docker) || complain "cannot build images: neither podman nor docker is installed; install podman or docker"

# A wheel of grpcio fits one version of Python on one kind of machine; SOABI identifies both.
abi='import sysconfig; print(sysconfig.get_config_var("SOABI"))'
ours=$("$PYTHON" -c "$abi")
theirs=$("$engine" run --rm --network none --entrypoint python3 "$base" -c "$abi") ||
  complain "cannot use base image $base: it does not run, or has no python3; use another image, or install Python 3.10 or later in it"
[ "$ours" = "$theirs" ] ||
  complain "cannot make wheels for $base: its Python is $theirs, but $PYTHON is $ours; set PYTHON to a Python of the image's version"

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
# Build in a copy: setuptools would create a build/ folder here, and reuse old files in it.
mkdir "$context/source"
cp -r pyproject.toml setup.py README.md LICENSE nni_sdk trial_keeper manager docs "$context/source"
(cd "$context/source" && "$PYTHON" -m pip wheel --quiet --disable-pip-version-check --wheel-dir "$context/wheels" "$project" pip)
rm -rf "$context/source"
"$engine" build --file "images/$image/Dockerfile" --build-arg "BASE_IMAGE=$base" \
  ${EXTRAS:+--build-arg "EXTRAS=$EXTRAS"} --tag "$tag" "$context"
