#!/bin/sh
# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
#
# Gets what draws the dashboards: the browser from Debian, and into the folder $1 the
# packages of npm that package-lock.json names, and the bundle of them and src, in "page".
set -eu
mkdir -p "$1"
out=$(cd "$1" && pwd)
cd "$(dirname "$0")"

missing=""
command -v chromium-headless-shell >/dev/null || missing="chromium-headless-shell"
command -v npm >/dev/null || missing="$missing nodejs npm"
if [ -n "$missing" ]; then
	export DEBIAN_FRONTEND=noninteractive
	# shellcheck disable=SC2086 # words are packages
	apt-get install -y --no-install-recommends $missing </dev/null || {
		apt-get update </dev/null
		apt-get install -y --no-install-recommends $missing </dev/null
	}
fi

cp -r package.json package-lock.json build.mjs src "$out/"
cd "$out"
# No package may run anything here: none needs to.
if ! cmp -s package-lock.json node_modules/.of; then
	npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
	cp package-lock.json node_modules/.of
fi
node build.mjs page
