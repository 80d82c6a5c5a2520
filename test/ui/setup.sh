#!/bin/sh
# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
#
# Installs the browser that the tests of kubectl gpu ui drive, from Debian. Does nothing when it is there.
set -eu
command -v chromium-headless-shell >/dev/null && exit 0
export DEBIAN_FRONTEND=noninteractive
# A machine that has just started may be installing updates by itself.
patient="-o DPkg::Lock::Timeout=600 -o Acquire::Retries=3"
# shellcheck disable=SC2086 # words are options
apt-get $patient install -y --no-install-recommends chromium-headless-shell </dev/null || {
	apt-get $patient update </dev/null
	apt-get $patient install -y --no-install-recommends chromium-headless-shell </dev/null
}
