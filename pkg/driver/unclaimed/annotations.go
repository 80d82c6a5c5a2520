// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/partage-dev/partage/pkg/node/host"
)

// NVIDIA's toolkit container has an NRI plugin, which gives containers the CDI devices that annotations of their pods name, in any
// namespace: nvidia.com/gpu=all, or the device of another claim (nvidia-container-toolkit 1.20.1,
// cmd/nvidia-ctk-installer/container/runtime/nri). These are its program, and what it is told by.
var installers = []string{"nvidia-ctk-installer", "nvidia-toolkit"}

const (
	nriFlag, nriVariable             = "--enable-nri-plugin", "ENABLE_NRI_PLUGIN"
	nriSocketFlag, nriSocketVariable = "--nri-socket", "NRI_SOCKET"
	nriSocket                        = "/var/run/nri/nri.sock"
)

// injector returns the process that gives containers what annotations of their pods name, or 0 if there is none. A process that a
// tenant has given such a name does not have the host's socket of the container runtime.
func (s Starter) injector() (pid int, err error) {
	processes, err := filepath.Glob(filepath.Join(s.Proc, "[0-9]*"))
	if err != nil {
		return 0, err
	}
	for _, folder := range processes {
		pid, _ := strconv.Atoi(filepath.Base(folder))
		other := Starter{Proc: s.Proc, PID: pid}
		arguments, err := other.words("cmdline")
		if err != nil || !slices.Contains(installers, filepath.Base(arguments[0])) {
			continue // a thread of the kernel, or it has ended
		}
		injects, err := s.injects(other, arguments)
		switch {
		case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ESRCH):
		case err != nil:
			return 0, fmt.Errorf("find out whether process %d (%s) gives containers what annotations name: %w", pid, arguments[0], err)
		case injects:
			return pid, nil
		}
	}
	return 0, nil
}

// injects fails for reasons of the host only: anybody can give a process such a name, and the rest of what it says of itself.
func (s Starter) injects(other Starter, arguments []string) (bool, error) {
	variables, err := other.words("environ")
	if err != nil && !errors.Is(err, errNoWords) {
		return false, err
	}
	enabled, _ := strconv.ParseBool(cmp.Or(setting(arguments, nriFlag, "true"), setting(variables, nriVariable, "")))
	if !enabled {
		return false, nil
	}
	socket := cmp.Or(setting(arguments, nriSocketFlag, ""), setting(variables, nriSocketVariable, ""), nriSocket)
	ours, err := statIn(s, nriSocket)
	if err != nil {
		return false, err
	}
	theirs, err := statIn(other, socket)
	return err == nil && os.SameFile(theirs, ours), nil // where the path leads nowhere, it leads the process nowhere
}

func statIn(s Starter, path string) (fs.FileInfo, error) {
	within, err := host.PathIn(s.path("root"), path)
	if err != nil {
		return nil, err
	}
	return os.Stat(within)
}

// setting returns what a flag, or a variable, is set to, the last one counts: as "name=value", as two words, or given for a flag alone.
func setting(words []string, name, alone string) (value string) {
	for i, word := range words {
		switch given, after, is := strings.Cut(word, "="); {
		case given != name:
		case is:
			value = after
		case alone != "":
			value = alone
		case i+1 < len(words):
			value = words[i+1]
		}
	}
	return value
}
