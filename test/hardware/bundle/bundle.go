// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package bundle says whether programs that were built on one machine start on another.
package bundle

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// Oldest is the glibc that programs of a bundle may ask for: that of the oldest systems that
// NVIDIA's drivers are used on. Later versions run them, too.
const Oldest = "2.34"

// Programs are the files of a bundle, and how each is started without doing anything.
var Programs = map[string][]string{
	"gpu-kubelet-plugin": {"conformance", "--help"},
	"cuda-probe":         {"-help"},
	"hardware-run":       {"-help"},
}

const (
	libcPrefix = "GLIBC_"
	startLimit = 20 * time.Second
)

// Needs returns the newest version of glibc that a program asks for. It is empty for one that
// is linked statically.
func Needs(path string) (string, error) {
	file, err := elf.Open(path)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", path, err)
	}
	defer func() { _ = file.Close() }()
	if file.SectionByType(elf.SHT_GNU_VERNEED) == nil {
		return "", nil
	}
	libraries, err := file.DynamicVersionNeeds()
	if err != nil {
		return "", fmt.Errorf("read the versions that %s needs: %w", path, err)
	}
	newest := ""
	for _, library := range libraries {
		for _, need := range library.Needs {
			version, isLibc := strings.CutPrefix(need.Dep, libcPrefix)
			if isLibc && Newer(version, newest) {
				newest = version
			}
		}
	}
	return newest, nil
}

// Newer reports whether a version such as 2.34 is newer than another one. Any is newer than
// none.
func Newer(a, b string) bool {
	one, other := strings.Split(a, "."), strings.Split(b, ".")
	for i := range max(len(one), len(other)) {
		x, y := number(one, i), number(other, i)
		if x != y {
			return x > y
		}
	}
	return false
}

func number(parts []string, i int) int {
	if i >= len(parts) {
		return 0
	}
	n, err := strconv.Atoi(parts[i])
	if err != nil {
		return 0
	}
	return n
}

// Check starts each program of the bundle in a folder. The error says of each that does not
// start why.
func Check(ctx context.Context, folder string) error {
	var errs []error
	for name, args := range Programs {
		errs = append(errs, start(ctx, filepath.Join(folder, name), args))
	}
	return errors.Join(errs...)
}

func start(ctx context.Context, path string, args []string) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{}
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	name := filepath.Base(path)
	if _, statErr := os.Stat(path); statErr != nil {
		return fmt.Errorf("%s is not in the bundle: %w", name, statErr)
	}
	needed, needsErr := Needs(path)
	here := Here(ctx)
	if needsErr == nil && here != "" && Newer(needed, here) {
		return fmt.Errorf("%s does not start: it needs glibc %s, this machine has %s", name, needed, here)
	}
	return fmt.Errorf("%s does not start: %w: %s", name, err, strings.TrimSpace(string(out)))
}

var versionAtEnd = regexp.MustCompile(`(\d+\.\d+)\s*$`)

// Here returns the version of this machine's glibc, or nothing where it cannot be found out.
func Here(ctx context.Context) string {
	for _, command := range [][]string{{"getconf", "GNU_LIBC_VERSION"}, {"ldd", "--version"}} {
		out, err := exec.CommandContext(ctx, command[0], command[1:]...).Output()
		if err != nil {
			continue
		}
		line, _, _ := strings.Cut(string(out), "\n")
		if found := versionAtEnd.FindStringSubmatch(line); found != nil {
			return found[1]
		}
	}
	return ""
}

// CheckBuilt fails unless the programs of a bundle would start on any machine that they are
// for, and the bundle has at most this many bytes.
func CheckBuilt(ctx context.Context, folder string, most int64) error {
	errs := []error{Check(ctx, folder)}
	var sum int64
	for name := range Programs {
		path := filepath.Join(folder, name)
		info, err := os.Stat(path)
		if err != nil {
			errs = append(errs, fmt.Errorf("measure the bundle: %w", err))
			continue
		}
		sum += info.Size()
		needed, err := Needs(path)
		if err != nil || Newer(needed, Oldest) {
			errs = append(errs, errors.Join(err, fmt.Errorf("%s needs glibc %s: want %s or older", name, needed, Oldest)))
		}
	}
	if sum > most {
		errs = append(errs, fmt.Errorf("the bundle has %d bytes: want at most %d", sum, most))
	}
	return errors.Join(errs...)
}
