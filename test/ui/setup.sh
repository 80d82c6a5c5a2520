#!/bin/sh
# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
#
# Installs the browser that the tests of kubectl gpu ui drive, from Debian. Does nothing when it is there.
set -eu
command -v chromium-headless-shell >/dev/null && exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get install -y --no-install-recommends chromium-headless-shell </dev/null || {
	apt-get update </dev/null
	apt-get install -y --no-install-recommends chromium-headless-shell </dev/null
}
