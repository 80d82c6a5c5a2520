// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package device

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/partage-dev/partage/pkg/gpu"
)

// GPUName returns the device name of the GPU at a PCI address, which is also that of
// its counter set: "gpu-0000-1b-00-0" for "0000:1b:00.0".
func GPUName(pciAddress string) string {
	return "gpu-" + strings.NewReplacer(":", "-", ".", "-").Replace(strings.ToLower(pciAddress))
}

// IsOf reports whether a device with this name is the GPU at a PCI address, or a part
// of it.
func IsOf(pciAddress, name string) bool { return AddressIn(name) == pciAddress }

// partitionName ends in the start of the placement, so that no text of a profile
// can make two names equal.
func partitionName(gpuName, profileText string, start int) string {
	return gpuName + "-mig-" + profileText + "-" + strconv.Itoa(start)
}

// staticName names a partition that somebody else made, after the device that could
// be made in its place. It is no name of such a device, as these end in a number.
func staticName(partitionName string) string { return partitionName + "-static" }

// observerName is no name of a partition or a GPU, as these end in a number.
func observerName(gpuName string) string { return gpuName + "-" + string(Observer) }

// shareName adds the kind to the name of the shared device. It is no name of a
// partition or a GPU, as these end in a number.
func shareName(base string, kind Kind) string { return base + "-" + string(kind) }

// profileTexts returns a unique text for every profile of a GPU, by ID, that can be
// part of a name. Profiles whose readable texts are equal, or whose names would be
// too long, get one made of their ID.
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
	name = strings.ReplaceAll(strings.ToLower(name), " ", "")
	size := len(name)
	if variant := strings.IndexAny(name, "+-"); variant >= 0 {
		size = variant
	}
	name = name[:size] + strings.NewReplacer("+", " ", "-", " no ", ".", " ").Replace(name[size:])
	words := strings.Fields(strings.Map(func(r rune) rune {
		if r == ' ' || r >= 'a' && r <= 'z' || r >= '0' && r <= '9' {
			return r
		}
		return -1
	}, name))
	return strings.Join(words, "-")
}

// ownName is how the names of all devices begin: with a PCI address, which may be all of it.
var ownName = regexp.MustCompile(`^gpu-([0-9a-f]{4,8})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])(?:-|$)`)

// IsName reports whether a device may have this name on some machine under some policy. Drivers
// of the same name may have others; NVIDIA's take the number of the GPU.
func IsName(name string) bool { return AddressIn(name) != "" }

// AddressIn returns the PCI address of the GPU in a device's name, or nothing where it has none.
func AddressIn(name string) string {
	parts := ownName.FindStringSubmatch(name)
	if parts == nil {
		return ""
	}
	return fmt.Sprintf("%s:%s:%s.%s", parts[1], parts[2], parts[3], parts[4])
}
