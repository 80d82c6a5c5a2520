// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/wait"
)

const (
	// MemorySocketSuffix is that of a socket on which a process of the driver takes a MemoryLimit and gives a MemoryAnswer, as
	// JSON. Its name is the PID.
	MemorySocketSuffix = ".sock"
	// MemoryTime is how long a process of the driver may take to answer. With pluginTime it is less than a hook has.
	MemoryTime = 20 * time.Second

	// pluginTime is how long the driver may not run, as when its pod is replaced.
	pluginTime = 20 * time.Second
)

// Variables by which NVIDIA's own hook is told a container's limit in MiB, and how much of it is guaranteed.
const (
	LimitVariable   = "NVIDIA_GPU_MEMORY_LIMIT"
	requestVariable = "NVIDIA_GPU_MEMORY_REQUEST"
)

// MemoryLimit is how much of a GPU's memory the container of a process may have, in bytes: Hard at most, of which Soft are kept
// for it.
type MemoryLimit struct {
	PID        int    `json:"pid"`
	PCIAddress string `json:"gpu"`
	UUID       string `json:"uuid"`
	Soft       uint64 `json:"soft"`
	Hard       uint64 `json:"hard"`
}

// MemoryAnswer has no error if the driver holds the limit. Later means that the process has just started, or ends, and there may
// soon be another answer.
type MemoryAnswer struct {
	Error string `json:"error,omitempty"`
	Later bool   `json:"later,omitempty"`
}

// LimitMemory has the GPU's driver limit the memory of a container, and refuses the container unless it does. The driver's library
// needs a C library, and a host may have another one than the library: so the plugin is asked, which has it loaded. input is what
// the runtime writes to hooks.
func LimitMemory(ctx context.Context, input io.Reader, sockets string, limit MemoryLimit) error {
	c, err := readContainer(input)
	if err == nil && c.pid <= 0 {
		err = errors.New("the container runtime does not tell the container's process")
	}
	if err == nil {
		err = limit.lower(c.Process.Env)
	}
	if err != nil {
		return fmt.Errorf("memory limit on GPU %s: %w", limit.PCIAddress, err)
	}
	if err := CheckMarkers(c.Process.Env); err != nil {
		return err
	}
	limit.PID = c.pid
	if err := ask(ctx, sockets, limit); err != nil {
		return fmt.Errorf("the driver does not limit this container to %d MiB of GPU %s, so it would run without its limit: %w",
			limit.Hard>>20, limit.PCIAddress, err)
	}
	return nil
}

// lower takes what the container's variables say, where that is less: they cannot ask for more than its share.
func (l *MemoryLimit) lower(env []string) error {
	for _, variable := range env {
		name, value, _ := strings.Cut(variable, "=")
		if name != LimitVariable && name != requestVariable {
			continue
		}
		mebibytes, err := strconv.ParseUint(value, 10, 44)
		// Drivers may take 0 for no limit at all.
		if err != nil || name == LimitVariable && mebibytes == 0 {
			return fmt.Errorf("this container has the variable %s: want a number of MiB", quote.Text(variable))
		}
		if name == LimitVariable {
			l.Hard = min(l.Hard, mebibytes<<20)
		} else {
			l.Soft = min(l.Soft, mebibytes<<20)
		}
	}
	l.Soft = min(l.Soft, l.Hard)
	return nil
}

// ask waits for a moment until a process of the driver answers.
func ask(ctx context.Context, sockets string, limit MemoryLimit) (err error) {
	limited, cancel := context.WithTimeout(ctx, pluginTime)
	defer cancel()
	_ = wait.Until(limited, func() (answered bool, _ error) {
		answered, err = askAny(ctx, sockets, limit)
		return answered, nil
	})
	return err
}

// askAny asks the first process that is there: there are two while the driver's pod is replaced.
func askAny(ctx context.Context, folder string, limit MemoryLimit) (answered bool, err error) {
	err = fmt.Errorf("the driver's plugin cannot be reached in %s: does its pod run on this node? The container starts once it does", folder)
	paths, globErr := filepath.Glob(filepath.Join(folder, "*"+MemorySocketSuffix))
	slices.Reverse(paths) // later PIDs mostly come last
	for _, path := range paths {
		answer, askErr := askAt(ctx, path, limit)
		switch {
		case askErr != nil:
			err = errors.Join(err, askErr)
		case answer.Later:
			err = errors.New(answer.Error)
		case answer.Error != "":
			return true, errors.New(answer.Error)
		default:
			return true, nil
		}
	}
	return false, errors.Join(err, globErr)
}

func askAt(ctx context.Context, path string, limit MemoryLimit) (answer MemoryAnswer, err error) {
	conn, err := (&net.Dialer{Timeout: dialLimit}).DialContext(ctx, "unix", path)
	if err != nil {
		return answer, err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(MemoryTime)); err != nil {
		return answer, err
	}
	if err := json.NewEncoder(conn).Encode(limit); err != nil {
		return answer, fmt.Errorf("ask at %s: %w", path, err)
	}
	if err := json.NewDecoder(io.LimitReader(conn, maxState)).Decode(&answer); err != nil {
		return answer, fmt.Errorf("wait for the answer at %s: %w", path, err)
	}
	return answer, nil
}
