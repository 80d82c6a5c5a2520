// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package boards

import (
	"strings"
	"testing"
)

func TestLoad(t *testing.T) {
	t.Parallel()
	names := Names()
	if len(names) < 18 {
		t.Errorf("%d boards, want at least 13", len(names))
	}
	for _, name := range names {
		node, err := Load(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if g := node.GPUs[0]; g.ProductName == "" || g.Resources.MemoryBytes == 0 || g.MIG != nil && len(g.MIG.Profiles) == 0 {
			t.Errorf("%s: %+v", name, g)
		}
	}
}

func TestLoadShortName(t *testing.T) {
	t.Parallel()
	for name, product := range map[string]string{"H100": "NVIDIA H100 80GB HBM3", "a100": "NVIDIA A100-SXM4-80GB", "gh200": "NVIDIA GH200 144G HBM3e"} {
		node, err := Load(name)
		if err != nil {
			t.Error(err)
			continue
		}
		if node.GPUs[0].ProductName != product {
			t.Errorf("%s is %q, want %q", name, node.GPUs[0].ProductName, product)
		}
	}
}

func TestLoadUnknown(t *testing.T) {
	t.Parallel()
	if _, err := Load("k80"); err == nil || !strings.Contains(err.Error(), `"k80" is not known`) || !strings.Contains(err.Error(), "h100-80-sxm") {
		t.Errorf("%v", err)
	}
}
