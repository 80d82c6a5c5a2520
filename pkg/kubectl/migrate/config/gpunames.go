// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"maps"
	"slices"
	"strings"
)

// productNames are the names of products, as patterns of a policy, by what clouds and
// autoscalers call them, without "nvidia" and "tesla".
var productNames = map[string]string{
	"k80": "Tesla K80", "p4": "Tesla P4", "p100": "Tesla P100*", "v100": "Tesla V100*", "t4": "Tesla T4", "t4g": "NVIDIA T4G",
	"a2": "NVIDIA A2", "a10": "NVIDIA A10", "a10g": "NVIDIA A10G", "a16": "NVIDIA A16", "a30": "NVIDIA A30", "a40": "NVIDIA A40",
	"a100": "NVIDIA A100*", "a100-40gb": "NVIDIA A100*40GB*", "a100-80gb": "NVIDIA A100*80GB*",
	"l4": "NVIDIA L4", "l40": "NVIDIA L40", "l40s": "NVIDIA L40S",
	"h100": "NVIDIA H100*", "h100-80gb": "NVIDIA H100*80GB*", "h100-mega-80gb": "NVIDIA H100*80GB*", "h200": "NVIDIA H200*", "h200-141gb": "NVIDIA H200*",
	"gh200": "NVIDIA GH200*", "b200": "NVIDIA B200*", "gb200": "NVIDIA GB200*",
	"rtx-pro-6000": "NVIDIA RTX PRO 6000*",
}

// productName returns the pattern for a GPU's name, and what it was looked up as.
func productName(name string) (pattern, short string, known bool) {
	short = strings.ToLower(strings.TrimSpace(name))
	short = strings.NewReplacer(" ", "-", "_", "-").Replace(short)
	for _, brand := range []string{"nvidia-", "tesla-"} {
		short = strings.TrimPrefix(short, brand)
	}
	pattern, known = productNames[short]
	return pattern, short, known
}

// knownNames lists the names of GPUs.
func knownNames() []string { return slices.Sorted(maps.Keys(productNames)) }
