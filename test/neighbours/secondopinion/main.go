// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command secondopinion compares what the plugin would publish of the same machine with two NVML libraries: the arguments are two files
// with ResourceSlices, as `gpu-kubelet-plugin slices` prints them. It prints one line for each attribute or capacity of a device of the
// first that is not the same in all devices of the second, and for each type of device that only one of them has.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "secondopinion:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	if len(args) != 2 {
		return errors.New("want two files with ResourceSlices")
	}
	first, err := read(args[0])
	if err != nil {
		return err
	}
	second, err := read(args[1])
	if err != nil {
		return err
	}
	for _, line := range slices.Sorted(maps.Keys(differences(first, second))) {
		fmt.Fprintln(out, line)
	}
	return nil
}

// facts are those of each device, by its name: of attributes and capacities the value, and as "type" the type.
type facts map[string]map[string]string

func read(path string) (facts, error) {
	file, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	devices := facts{}
	for documents := yaml.NewYAMLReader(bufio.NewReader(file)); ; {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return devices, nil
		}
		var s resourceapi.ResourceSlice
		if err == nil {
			err = yaml.Unmarshal(document, &s)
		}
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", path, err)
		}
		for _, d := range s.Spec.Devices {
			devices[d.Name] = of(d)
		}
	}
}

func of(d resourceapi.Device) map[string]string {
	values := map[string]string{}
	for name, a := range d.Attributes {
		switch {
		case a.StringValue != nil:
			values[string(name)] = *a.StringValue
		case a.VersionValue != nil:
			values[string(name)] = *a.VersionValue
		case a.BoolValue != nil:
			values[string(name)] = fmt.Sprint(*a.BoolValue)
		case a.IntValue != nil:
			values[string(name)] = fmt.Sprint(*a.IntValue)
		}
	}
	for name, c := range d.Capacity {
		values[string(name)] = c.Value.String()
	}
	for _, taint := range d.Taints {
		values["taint "+taint.Key] = string(taint.Effect)
	}
	return values
}

// differences are lines for people; what is the same for several devices is one.
func differences(first, second facts) map[string]bool {
	lines := map[string]bool{}
	missing := map[string]int{}
	for name, ours := range first {
		theirs, found := second[name]
		if !found {
			missing[ours["type"]]++
			continue
		}
		all := maps.Clone(ours)
		maps.Copy(all, theirs)
		for key := range all {
			if ours[key] != theirs[key] {
				lines[fmt.Sprintf("%s %s: %s, %s", ours["type"], key, orNone(ours[key]), orNone(theirs[key]))] = true
			}
		}
	}
	for kind, n := range missing {
		lines[fmt.Sprintf("%s: %d devices, none", kind, n)] = true
	}
	return lines
}

func orNone(value string) string {
	if strings.TrimSpace(value) == "" {
		return "none"
	}
	return value
}
