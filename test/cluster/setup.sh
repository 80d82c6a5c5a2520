#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0

# Installs what the builds and the local cluster need and the machine lacks, on
# Debian and Ubuntu; elsewhere it says what is missing. Asks nothing.
set -euo pipefail

missing=()
need() { # package, how to tell that it is there
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
need gcc command -v gcc
need libc6-dev test -e /usr/include/stdlib.h
need make command -v make
need git command -v git
need pkg-config command -v pkg-config
need libseccomp-dev pkg-config --exists libseccomp # for runc
need busybox-static test -x /bin/busybox           # for the demo image
[[ ${#missing[@]} -gt 0 ]] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "missing here: ${missing[*]} (names of the Debian packages); install them with this system's package manager" >&2
  exit 1
fi
if [[ $(id -u) != 0 ]]; then
  echo "missing here: ${missing[*]}; run as root, or: sudo apt-get install ${missing[*]}" >&2
  exit 1
fi
echo "installing ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq </dev/null
apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
