#!/usr/bin/env bash
# Builds an image: the wheels on this machine, the rest with podman or docker. The build needs no network, except to pull a
# base image that is not on this machine yet.
#
# usage: images/build.sh keeper|manager TAG [BASE_IMAGE]
#
# BASE_IMAGE (default: python:3.11-slim) is, for `keeper`, the image in which the training code runs. PYTHON (default: python3)
# is a Python of the base image's version, with pip. EXTRAS names further extras of the manager, such as tuners. SBOM names a
# file for the software bill of materials (CycloneDX), which the image then contains too.
#
# Versions and digests of all packages are those of images/requirements, which `make lock` writes.
set -euo pipefail
[ -z "${SBOM:-}" ] || SBOM=$(realpath --no-symlinks "$SBOM")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
EXTRAS=${EXTRAS:-}

complain() {
  echo "$1" >&2
  exit 1
}

case $#:${1-} in
  [23]:keeper)
    project=trial-keeper
    EXTRAS=
    ;;
  [23]:manager) project="trial-keeper[manager,kubernetes${EXTRAS:+,$EXTRAS}]" ;;
  *) complain "cannot build '$*'; usage: images/build.sh keeper|manager TAG [BASE_IMAGE]" ;;
esac
image=$1
tag=$2
for name in "$image" ${EXTRAS//,/ }; do
  [ -f "images/requirements/$name.txt" ] ||
    complain "cannot build with EXTRAS=$EXTRAS: there is no extra '$name' for an image; use $(cd images/requirements && ls | sed -n 's/\.txt$//; /^keeper$\|^manager$/!p' | paste -sd, | sed 's/,/, /g')"
done
[ -z "${SBOM:-}" ] || hash cyclonedx-py 2>/dev/null ||
  complain "cannot write $SBOM: cyclonedx-py is missing; run pip install cyclonedx-bom, or build without SBOM"
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
pip() { "$PYTHON" -m pip "$@" --quiet --disable-pip-version-check; }
pip wheel --no-deps --wheel-dir "$context/wheels" "$context/source"
rm -rf "$context/source"
for name in "$image" ${EXTRAS//,/ }; do
  pip wheel --no-deps --require-hashes --requirement "images/requirements/$name.txt" --wheel-dir "$context/wheels"
done
# The Dockerfile copies the folder, empty or not.
mkdir "$context/sbom"
if [ "${SBOM:-}" ]; then
  "$PYTHON" -m venv --without-pip "$context/environment"
  pip --python "$context/environment" install --no-compile --no-index --find-links "$context/wheels" "$project"
  cyclonedx-py environment --output-reproducible --output-file "$context/sbom/sbom.cdx.json" "$context/environment"
  rm -rf "$context/environment"
  cp "$context/sbom/sbom.cdx.json" "$SBOM"
fi
"$engine" build --file "images/$image/Dockerfile" --build-arg "BASE_IMAGE=$base" \
  ${EXTRAS:+--build-arg "EXTRAS=$EXTRAS"} --label "org.opencontainers.image.base.name=$base" --tag "$tag" "$context"
