// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"testing"

	"github.com/partage-dev/partage/test/flow/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
