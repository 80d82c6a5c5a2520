// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nvml

import "testing"

func TestPCIAddress(t *testing.T) {
	tests := map[string]struct {
		busID, want string
		fails       bool
	}{
		"as NVML writes it":              {busID: "00000000:1B:00.0", want: "0000:1b:00.0"},
		"as the kernel does":             {busID: "0000:1b:00.0", want: "0000:1b:00.0"},
		"domain":                         {busID: "00000001:C1:02.3", want: "0001:c1:02.3"},
		"domain of a machine in a cloud": {busID: "00009C2B:00:00.0", want: "9c2b:00:00.0"},
		"more than 16 bits":              {busID: "00010000:E1:00.0", want: "10000:e1:00.0"},
		"empty":                          {fails: true},
		"no function":                    {busID: "0000:1b:00", fails: true},
		"no domain":                      {busID: "1b:00.0", fails: true},
		"not hexadecimal":                {busID: "0000:xx:00.0", fails: true},
		"too large":                      {busID: "100000000:1b:00.0", fails: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := pciAddress(test.busID)
			if got != test.want || (err != nil) != test.fails {
				t.Errorf("got %q, %v; want %q", got, err, test.want)
			}
		})
	}
}

func TestPCIDeviceID(t *testing.T) {
	for combined, want := range map[uint32]string{0x233010de: "10de:2330", 0x00fa10de: "10de:00fa", 0: ""} {
		if got := pciDeviceID(combined); got != want {
			t.Errorf("%#x: got %q, want %q", combined, got, want)
		}
	}
}

func TestLibraryVersion(t *testing.T) {
	tests := map[string]string{
		"/usr/lib64/libnvidia-ml.so.580.95.05": "580.95.05",
		"/usr/lib64/libnvidia-ml.so.1":         "",
		"libnvidia-ml.so":                      "",
		"":                                     "",
	}
	for path, want := range tests {
		if got := libraryVersion(path); got != want {
			t.Errorf("%q: got %q, want %q", path, got, want)
		}
	}
}
