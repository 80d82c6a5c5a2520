// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package exposure finds out whether containers without a claim can have this node's
// GPUs: NVIDIA's container runtime gives them to each container that sets
// NVIDIA_VISIBLE_DEVICES, as most CUDA images do.
//
// What started this very container is what starts every other one that names no
// RuntimeClass. Its parent process, which it sees in the host's PID namespace, knows the
// program; so nothing of the host has to be mounted, and no configuration of a container
// runtime, which may not be in force, is guessed at.
package exposure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	config "github.com/NVIDIA/nvidia-container-toolkit/api/config/v1"

	"github.com/partage-dev/partage/pkg/host"
)

// Option is the setting of NVIDIA's container runtime that decides, and its name in the
// environment of the container that installs the runtime (GPU operator: toolkit.env).
const (
	Option            = "accept-nvidia-visible-devices-envvar-when-unprivileged"
	OptionEnvironment = "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED"
)

// Node says where to look.
type Node struct {
	// Proc is the proc file system of the host's PID namespace.
	Proc string
	// Parent is the process that started this container.
	Parent int
	// Handlers are the names of the container runtime's handlers, which pods choose with
	// a RuntimeClass.
	Handlers []string
}

// Finding is what a container gets that has no claim.
type Finding struct {
	// Runtime starts the containers that name no RuntimeClass: a path, or a name.
	Runtime string
	// Through is what runs NVIDIA's software for all these containers: its runtime, or the
	// file of its hook. It is empty where nothing does.
	Through string
	// Handlers are those of NVIDIA's.
	Handlers []string
	// Config is the file that has the Option, or where it would have to be, and Accepts
	// says that containers are given what their environment asks for.
	Config  string
	Accepts bool
}

// Open reports whether containers can have GPUs without a claim.
func (f Finding) Open() bool { return f.Accepts && (f.Through != "" || len(f.Handlers) > 0) }

// Text says what is open, and what to do about it.
func (f Finding) Text() string {
	if !f.Open() {
		return "Containers have GPUs of this node through claims only"
	}
	who := fmt.Sprintf("Every container on this node can have all GPUs without a claim: %s gives them", f.Through)
	instead := "or make another runtime the default"
	if f.Through == "" {
		who = fmt.Sprintf("Pods can have all GPUs of this node without a claim: a RuntimeClass with handler %s gives them",
			strings.Join(f.Handlers, " or "))
		instead = "or remove the handler"
	}
	return fmt.Sprintf("%s to containers whose image or pod sets NVIDIA_VISIBLE_DEVICES. Set %s = false in %s (GPU operator: %s=false in toolkit.env), %s",
		who, Option, f.Config, OptionEnvironment, instead)
}

// program is the name of NVIDIA's runtime and, with a suffix, of its variants.
const program = "nvidia-container-runtime"

// Where the runtime finds its configuration. The container that installs it puts one
// beside it, and a script that names it in its place.
const (
	systemConfig   = "/etc/" + config.RelativeFilePath
	operatorFolder = "/usr/local/nvidia/toolkit"
)

// Look reads the files of the host as the parent process sees them. An error means that
// nothing is known.
func (n Node) Look() (Finding, error) {
	var f Finding
	// software is NVIDIA's program that is run for all containers.
	var software string
	arguments, err := n.words("cmdline")
	if err != nil {
		return f, fmt.Errorf("find out what started this container: %w", err)
	}
	switch parent := filepath.Base(arguments[0]); {
	case strings.HasPrefix(parent, "containerd-shim-runc-"):
		f.Runtime, err = n.runtimeOfShim()
	case strings.HasPrefix(parent, "conmon"):
		if f.Runtime, err = runtimeOfMonitor(arguments); err == nil {
			f.Through, software, err = n.hook()
		}
	default:
		err = errors.New("it is none of the programs that containerd, CRI-O and Docker start containers with")
	}
	if err != nil {
		return f, fmt.Errorf("find out which runtime started this container from process %d (%s): %w", n.Parent, filepath.Base(arguments[0]), err)
	}
	if strings.HasPrefix(filepath.Base(f.Runtime), program) {
		f.Through, software = f.Runtime, f.Runtime
	}
	for _, handler := range n.Handlers {
		if strings.Contains(handler, "nvidia") {
			f.Handlers = append(f.Handlers, handler)
		}
	}
	if f.Through != "" || len(f.Handlers) > 0 {
		err = n.readConfig(&f, software)
	}
	return f, err
}

// words reads a file of the parent's that separates words by NUL.
func (n Node) words(name string) ([]string, error) {
	data, err := os.ReadFile(n.path(name))
	if err != nil {
		return nil, err
	}
	words := strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00")
	if words[0] == "" {
		return nil, fmt.Errorf("%s is empty", n.path(name))
	}
	return words, nil
}

func (n Node) path(name string) string {
	return filepath.Join(n.Proc, strconv.Itoa(n.Parent), name)
}

// runtimeOfShim reads what containerd's shim has written down beside the pod's sandbox,
// its working folder: the runtime, or nothing for the one it is built for.
func (n Node) runtimeOfShim() (string, error) {
	data, err := os.ReadFile(n.path("cwd/runtime"))
	if err != nil {
		return "", err
	}
	if runtime := strings.TrimSpace(string(data)); runtime != "" {
		return runtime, nil
	}
	return "runc", nil
}

// runtimeOfMonitor reads the command line of conmon or conmonrs.
func runtimeOfMonitor(arguments []string) (string, error) {
	for i, argument := range arguments {
		name, value, given := strings.Cut(argument, "=")
		if name != "-r" && name != "--runtime" {
			continue
		}
		if !given && i+1 < len(arguments) {
			value = arguments[i+1]
		}
		if value != "" {
			return value, nil
		}
	}
	return "", errors.New("its command line names no runtime")
}

// hook finds NVIDIA's hook among those that CRI-O runs for all containers, and the
// program that it runs.
func (n Node) hook() (file, software string, err error) {
	for _, folder := range []string{"/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"} {
		within, err := host.PathIn(n.path("root"), folder)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", "", err
		}
		files, err := filepath.Glob(filepath.Join(within, "*.json"))
		if err != nil {
			return "", "", err
		}
		for _, file := range files {
			data, err := os.ReadFile(file)
			if err != nil {
				return "", "", err
			}
			named := filepath.Join(folder, filepath.Base(file))
			var definition struct {
				Hook struct{ Path string }
			}
			if err := json.Unmarshal(data, &definition); err != nil {
				return "", "", fmt.Errorf("read the hook %s: %w", named, err)
			}
			if path := definition.Hook.Path; slices.Contains(hooks, filepath.Base(path)) {
				return named, path, nil
			}
		}
	}
	return "", "", nil
}

// hooks are the names of NVIDIA's hook.
var hooks = []string{program + "-hook", "nvidia-container-toolkit"}

// readConfig reads the Option where NVIDIA's software would.
func (n Node) readConfig(f *Finding, software string) error {
	read := false
	for _, path := range n.configs(software) {
		file, err := host.PathIn(n.path("root"), path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("read the configuration of NVIDIA's container runtime: %w", err)
		}
		accepts, err := readOption(file)
		if err != nil {
			return fmt.Errorf("read the configuration of NVIDIA's container runtime in %s: %w", path, err)
		}
		read, f.Config, f.Accepts = true, path, accepts
		// What a handler runs is not known, so that each of them may count.
		if accepts || software != "" {
			return nil
		}
	}
	if !read {
		// Its defaults hold.
		f.Config, f.Accepts = systemConfig, true
	}
	return nil
}

func readOption(file string) (bool, error) {
	settings, err := config.New(config.WithConfigFile(file), config.WithRequired(true))
	if err != nil {
		return false, err
	}
	value := settings.GetDefault(Option, true)
	accepts, isBool := value.(bool)
	if !isBool {
		return false, fmt.Errorf("%s is %v, want true or false", Option, value)
	}
	return accepts, nil
}

// configs are the paths where the configuration may be, the one that counts first.
// Without the program that is run, only the usual places are known.
func (n Node) configs(software string) []string {
	beside := func(folder string) string { return filepath.Join(folder, ".config", config.RelativeFilePath) }
	if software == "" {
		return []string{beside(operatorFolder), systemConfig}
	}
	var paths []string
	if filepath.IsAbs(software) {
		paths = append(paths, beside(filepath.Dir(software)))
	}
	// The program has the environment of the process that starts it.
	environment, err := n.words("environ")
	if err != nil {
		return append(paths, systemConfig)
	}
	if path := valueOf(environment, config.FilePathOverrideEnvVar); path != "" {
		paths = append(paths, path)
	}
	if folder := valueOf(environment, "XDG_CONFIG_HOME"); folder != "" {
		paths = append(paths, filepath.Join(folder, config.RelativeFilePath))
	}
	return append(paths, systemConfig)
}

func valueOf(environment []string, name string) string {
	for _, variable := range environment {
		if value, found := strings.CutPrefix(variable, name+"="); found {
			return value
		}
	}
	return ""
}
