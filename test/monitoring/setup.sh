#!/bin/sh
# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
#
# Puts prometheus and promtool into the folder $1, unless they are there: those of this
# machine, or else those of Debian's package, which is unpacked and not installed, so that
# no server is started and nothing that it depends on is needed.
set -eu
out=$1

if [ -x "$out/prometheus" ] && [ -x "$out/promtool" ]; then
	exit 0
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
	ln -sf "$(command -v prometheus)" "$(command -v promtool)" "$out/"
	exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
	echo "setup: not a Debian or Ubuntu machine; put prometheus and promtool into PATH" >&2
	exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
# apt-get's own user may write here.
chmod 777 .
apt-get -o Acquire::Retries=3 download prometheus </dev/null || {
	apt-get -o Acquire::Retries=3 update </dev/null
	apt-get -o Acquire::Retries=3 download prometheus </dev/null
}
dpkg-deb -x prometheus_*.deb .
mv usr/bin/prometheus usr/bin/promtool "$out/"
