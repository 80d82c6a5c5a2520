// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/gpu"
)

// GPUName is the device name of the GPU at a PCI address, and the name of its
// counter set: "gpu-0000-1b-00-0" for "0000:1b:00.0".
func GPUName(pciAddress string) string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(strings.ToLower(pciAddress))
}

// partitionName ends in the start of the placement, so that nothing in the
// profile's text can make two names alike.
func partitionName(gpuName, profileText string, start int) string {
	return gpuName + "-mig-" + profileText + "-" + strconv.Itoa(start)
}

// staticName is the name of what somebody else made in the place of a partition.
// Names of partitions end in a number, so it is never one of theirs.
func staticName(partitionName string) string { return partitionName + "-static" }

// shareName adds the kind to the name of what is shared. Names of partitions end
// in a number, and those of GPUs too, so it is neither's.
func shareName(base string, kind Kind) string { return base + "-" + string(kind) }

// profileTexts gives every profile of a GPU, by ID, a text of its own that can
// be part of a name. The readable text is tried first; profiles that share one
// or whose names would be too long are called by their ID instead.
func profileTexts(gpuName string, mig *gpu.MIG) map[uint32]string {
	uses := map[string]int{}
	for _, p := range mig.Profiles {
		uses[profileText(p.Name)]++
	}
	texts := make(map[uint32]string, len(mig.Profiles))
	for _, p := range mig.Profiles {
		text := profileText(p.Name)
		longest := shareName(partitionName(gpuName, text, mig.MemorySlices), TimeSlice)
		if text == "" || uses[text] > 1 || len(longest) > validation.DNS1123LabelMaxLength {
			text = "p" + strconv.FormatUint(uint64(p.ID), 10)
		}
		texts[p.ID] = text
	}
	return texts
}

// profileText spells a profile's name with what a DNS label allows:
// "1g.10gb+me" is "1g10gb-me", "1g.24gb-me" is "1g24gb-no-me" and
// "1g.24gb+me.all" is "1g24gb-me-all".
func profileText(name string) string {
	var parts []string
	var part strings.Builder
	end := func() {
		if part.Len() > 0 {
			parts = append(parts, part.String())
			part.Reset()
		}
	}
	variant := false
	for _, r := range strings.ToLower(name) {
		switch {
		case r >= 'a' && r <= 'z' || r >= '0' && r <= '9':
			part.WriteRune(r)
		case r == '+':
			end()
			variant = true
		case r == '-':
			end()
			variant = true
			parts = append(parts, "no")
		case r == '.' && variant:
			end()
		}
	}
	end()
	return strings.Join(parts, "-")
}
