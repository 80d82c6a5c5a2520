// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package versions holds what was seen of the driver on several versions of Kubernetes, and makes the table of
// docs/reference/compatibility.md of it. `make test-versions` sees for itself again.
package versions

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/mod/semver"
	"sigs.k8s.io/yaml"
)

// Report is what was seen on one cluster, on a node with eight H100.
type Report struct {
	// Kubernetes is the version that the API server says it has.
	Kubernetes string `json:"kubernetes"`
	// Kubelet is the version of the kubelet, if it is another one.
	Kubelet string `json:"kubelet,omitempty"`
	// FeatureGates are those that are not as they are by default.
	FeatureGates string `json:"featureGates,omitempty"`
	// Devices counts the published devices by type.
	Devices map[string]int `json:"devices"`
	// Taints: the API server stores taints of devices.
	Taints bool `json:"taints"`
	// ExtendedResources: the API server stores the resource name of a DeviceClass, and the driver has devices for it.
	ExtendedResources bool `json:"extendedResources"`
	// Said is what the driver says about what it leaves out.
	Said []string `json:"said,omitempty"`
	// Demos are the demos that ran.
	Demos []string `json:"demos"`
	// OtherDemos are the demos that need something that is not offered there, and what: a word of their file needs, or "scheduler" where
	// the scheduler finds no devices although there are.
	OtherDemos map[string][]string `json:"otherDemos,omitempty"`
	// Full is what became of more pods than fit on four GPUs.
	Full Full `json:"full"`
}

// Full is what became of more pods than fit, of every kind, asked for at the same time.
type Full struct {
	Asked      int `json:"asked"`
	GivenTwice int `json:"givenTwice"` // devices that overlap, as allocated or as the containers see them
	Refused    int `json:"refused"`    // claims that the scheduler allocated and the driver did not prepare
}

// Save writes the report to a file.
func (r Report) Save(file string) error {
	b, err := yaml.Marshal(r)
	if err != nil {
		return fmt.Errorf("encode the report on Kubernetes %s: %w", r.Kubernetes, err)
	}
	if err := os.WriteFile(file, b, 0o644); err != nil { //nolint:gosec // for reading
		return fmt.Errorf("write the report on Kubernetes %s: %w", r.Kubernetes, err)
	}
	return nil
}

// Load reads the reports of a folder, oldest version first.
func Load(folder string) ([]Report, error) {
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil {
		return nil, fmt.Errorf("list reports: %w", err)
	}
	var reports []Report
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("read a report: %w", err)
		}
		var r Report
		if err := yaml.UnmarshalStrict(b, &r); err != nil {
			return nil, fmt.Errorf("read report %s: %w", file, err)
		}
		reports = append(reports, r)
	}
	slices.SortFunc(reports, func(a, b Report) int {
		return cmp.Or(semver.Compare(a.Kubernetes, b.Kubernetes), strings.Compare(a.FeatureGates, b.FeatureGates), strings.Compare(b.Kubelet, a.Kubelet))
	})
	return reports, nil
}

// Markdown returns the reports as a table, and below it what the driver says where it leaves something out.
func Markdown(reports []Report) string {
	var b strings.Builder
	b.WriteString("| Kubernetes | feature gates | GPUs | partitions | MPS shares | time-slice shares | observers | taints | resource names | demos | devices given twice |\n")
	b.WriteString("|---|---|---|---|---|---|---|---|---|---|---|\n")
	for _, r := range reports {
		row := []string{r.version(), cmp.Or(gates(r.FeatureGates), "as by default")}
		for _, kind := range []string{"gpu", "mig", "mps", "timeslice", "observer"} {
			row = append(row, count(r.Devices[kind]))
		}
		row = append(row, yes(r.Taints), yes(r.ExtendedResources), fmt.Sprintf("%d of %d", len(r.Demos), len(r.Demos)+len(r.OtherDemos)),
			cmp.Or(strings.TrimPrefix(fmt.Sprint(r.Full.GivenTwice), "0"), "none"))
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
	}
	for _, r := range reports {
		if len(r.Said) == 0 {
			continue
		}
		fmt.Fprintf(&b, "\nOn %s%s the driver says:\n", r.version(), with(r.FeatureGates))
		for _, line := range r.Said {
			fmt.Fprintf(&b, "\n> %s\n", line)
		}
	}
	return b.String()
}

// version is that of Kubernetes, and of the kubelet if it is another one.
func (r Report) version() string {
	if r.Kubelet == "" {
		return strings.TrimPrefix(r.Kubernetes, "v")
	}
	return strings.TrimPrefix(r.Kubernetes, "v") + ", kubelet " + strings.TrimPrefix(r.Kubelet, "v")
}

// gates lists feature gates that are not as by default, one a line.
func gates(flag string) string {
	if flag == "" {
		return ""
	}
	return "`" + strings.ReplaceAll(flag, ",", "`<br>`") + "`"
}

func with(flag string) string {
	if flag == "" {
		return ""
	}
	return " with these feature gates"
}

func count(n int) string {
	if n == 0 {
		return "–"
	}
	return fmt.Sprint(n)
}

func yes(has bool) string {
	if has {
		return "yes"
	}
	return "no"
}
