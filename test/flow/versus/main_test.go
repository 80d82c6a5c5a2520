// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package versus measures the driver and NVIDIA's DRA driver in one run, in turns.
package versus

import (
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
