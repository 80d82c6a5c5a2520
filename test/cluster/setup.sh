#!/bin/sh
# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
#
# Installs what building and running the local cluster needs beside Go, where apt-get can; otherwise names it. Does nothing when
# all is there. Works without a terminal.
set -eu

missing=""
need() { # need PACKAGE COMMAND...: the package is missing when the command fails
	package=$1
	shift
	"$@" >/dev/null 2>&1 || missing="$missing $package"
}
has() { command -v "$1"; }
static_busybox() { has busybox && ! ldd "$(command -v busybox)"; }

need gcc has gcc
need libc6-dev sh -c 'echo "#include <stdio.h>" | gcc -E -'
need pkg-config has pkg-config
need libseccomp-dev pkg-config --exists libseccomp
need busybox-static static_busybox
need mount has mount

has go >/dev/null || echo "setup: go is not in PATH: install it from https://go.dev/dl" >&2

if [ -z "$missing" ]; then
	exit 0
fi
if ! has apt-get >/dev/null; then
	echo "setup: not a Debian or Ubuntu machine; install what Debian calls:$missing" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "setup: run as root: apt-get install$missing" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
# A machine that has just started may be installing updates by itself.
patient="-o DPkg::Lock::Timeout=600 -o Acquire::Retries=3"
# shellcheck disable=SC2086 # words are options and packages
apt-get $patient install -y --no-install-recommends $missing </dev/null || {
	apt-get $patient update </dev/null
	apt-get $patient install -y --no-install-recommends $missing </dev/null
}
