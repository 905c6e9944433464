#!/usr/bin/env bash
# Makes FILE.tar, the root of an image that replaces python:3.11-slim if no image registry can be reached: Debian 12 with its
# Python 3.11, bash and coreutils, from Debian's own packages. For tests only, not for training.
#
# usage: images/test-base.sh FILE.tar [PACKAGE ...]       (as root, with mmdebstrap; further packages of Debian)
set -euo pipefail
tar_file=${1:?usage: images/test-base.sh FILE.tar [PACKAGE ...]}
shift
further=$(printf ',%s' "$@")
root=$(mktemp -d "${TMPDIR:-/var/tmp}/trial-keeper-base.XXXXXX")
trap 'rm -rf "$root"' EXIT

# `extract` unpacks packages without configuring them, in a third of the time. libstdc++6 is for grpcio, as in python:3.11-slim.
# The links in /, which no package contains, must exist before the packages are unpacked.
mmdebstrap --quiet --mode=root --variant=extract --format=directory \
  --setup-hook='for name in bin sbin lib lib64; do mkdir -p "$1/usr/$name"; ln -s "usr/$name" "$1/$name"; done' \
  --include=base-files,bash,coreutils,dash,grep,libc-bin,libstdc++6,python3,sed,util-linux"${further%,}" \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
  --dpkgopt='path-exclude=/usr/share/locale/*' \
  --aptopt='Apt::Install-Recommends "false"' --aptopt='Acquire::Languages "none"' \
  bookworm "$root"

# These steps replace the packages' own scripts.
echo 'root:x:0:0:root:/root:/bin/bash' > "$root/etc/passwd"
echo 'sshd:x:100:65534::/run/sshd:/usr/sbin/nologin' >> "$root/etc/passwd"
echo 'root:x:0:' > "$root/etc/group"
[ ! -e "$root/usr/bin/mpirun.openmpi" ] || ln -s mpirun.openmpi "$root/usr/bin/mpirun"
ln -sf dash "$root/usr/bin/sh"
mkdir -p -m 1777 "$root/tmp"
mkdir -p "$root"/{dev,mnt,proc,root,run,sys}
/sbin/ldconfig -r "$root"

tar -C "$root" --one-file-system -cf "$tar_file" .
