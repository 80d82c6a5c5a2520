// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package unclaimed

import (
	"bytes"
	"cmp"
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
	corev1 "k8s.io/api/core/v1"

	"github.com/partage-dev/partage/pkg/node/host"
)

// The setting of NVIDIA's container runtime that decides, and its name in the environment of the container that installs the
// runtime (GPU operator: toolkit.env).
const (
	option            = "accept-nvidia-visible-devices-envvar-when-unprivileged"
	optionEnvironment = "ACCEPT_NVIDIA_VISIBLE_DEVICES_ENVVAR_WHEN_UNPRIVILEGED"
)

// Starter is the process that started this container. It starts every other one that names no RuntimeClass, too, and it sees
// the files of the host; so nothing of the host has to be mounted, and no configuration of a container runtime, which may
// not be in force, is guessed at.
type Starter struct {
	// Proc is the proc file system of the host's PID namespace.
	Proc string
	PID  int
	// Trusted are the namespaces whose pods may name GPUs in annotations: an admission policy refuses them elsewhere. It is nil where there
	// is no policy.
	Trusted []string
}

// Access is what a container gets that has no claim.
type Access struct {
	// Runtime starts the containers that name no RuntimeClass: a path, or a name.
	Runtime string
	// Through is what runs NVIDIA's software for all these containers: its runtime, or the file of its hook. It is empty where
	// nothing does.
	Through string
	// Handlers are the names under which the configuration of the container runtime has NVIDIA's runtime.
	Handlers []string
	// Injector is the process that gives containers what annotations of their pods name, or 0. Trusted is that of the Starter.
	Injector int
	Trusted  []string
	// Config is the file that has the option, or where it would have to be, and Accepts says that containers are given what
	// their environment asks for.
	Config  string
	Accepts bool
}

// Open reports whether containers can have GPUs without a claim.
func (a Access) Open() bool { return a.byVariable() || a.byAnnotation() }

func (a Access) byVariable() bool { return a.Accepts && (a.Through != "" || len(a.Handlers) > 0) }

func (a Access) byAnnotation() bool { return a.Injector != 0 && a.Trusted == nil }

// Text says what is open, and what to do about it.
func (a Access) Text() string {
	var open []string
	if a.byVariable() {
		open = append(open, a.runtimeText())
	}
	if a.byAnnotation() {
		open = append(open, fmt.Sprintf("Pods can have all GPUs of this node without a claim, and those of others' claims: NVIDIA's NRI plugin (process %d) gives "+
			"containers what annotations nvidia.cdi.k8s.io of their pod name. Have the chart's annotationPolicy refuse them, or turn the plugin off "+
			"(GPU operator: cdi.nriPluginEnabled=false)", a.Injector))
	}
	switch {
	case len(open) > 0:
		return strings.Join(open, ". ")
	case a.Injector != 0:
		return fmt.Sprintf("Containers have GPUs of this node through claims only, but for pods of the namespaces %s: NVIDIA's NRI plugin gives "+
			"them what their annotations name", strings.Join(a.Trusted, ", "))
	}
	return "Containers have GPUs of this node through claims only"
}

func (a Access) runtimeText() string {
	who := fmt.Sprintf("Every container on this node can have all GPUs without a claim: %s gives them", a.Through)
	instead := "or make another runtime the default"
	if a.Through == "" {
		who = fmt.Sprintf("Pods can have all GPUs of this node without a claim: a RuntimeClass with handler %s gives them",
			strings.Join(a.Handlers, " or "))
		instead = "or remove the handler"
	}
	return fmt.Sprintf("%s to containers whose image or pod sets NVIDIA_VISIBLE_DEVICES. Set %s = false in %s (GPU operator: %s=false in toolkit.env), %s",
		who, option, a.Config, optionEnvironment, instead)
}

// Handlers are the names of the handlers of a node's container runtime, which pods choose with a RuntimeClass, except for the
// default one, which has none. It is nil where the container runtime does not tell the kubelet.
func Handlers(node *corev1.Node) []string {
	if len(node.Status.RuntimeHandlers) == 0 {
		return nil
	}
	names := []string{}
	for _, handler := range node.Status.RuntimeHandlers {
		if handler.Name != "" {
			names = append(names, handler.Name)
		}
	}
	return names
}

// program is the name of NVIDIA's runtime and, with a suffix, of its variants.
const program = "nvidia-container-runtime"

// Access finds out what containers can have through NVIDIA's container runtime, which gives all GPUs to each that sets
// NVIDIA_VISIBLE_DEVICES, as most CUDA images do, and through its NRI plugin. An error means that this is not known.
func (s Starter) Access(handlers []string) (Access, error) {
	a := Access{Trusted: s.Trusted}
	arguments, err := s.words("cmdline")
	if err != nil {
		return a, fmt.Errorf("find out what started this container: %w", err)
	}
	// software is NVIDIA's program that is run for all containers.
	var software string
	starter := filepath.Base(arguments[0])
	switch {
	case strings.HasPrefix(starter, "containerd-shim-runc-"):
		// The shim has written it down beside the pod's sandbox, its working folder: the runtime, or nothing for the one it is built for.
		var data []byte
		data, err = os.ReadFile(s.path("cwd/runtime"))
		a.Runtime = cmp.Or(strings.TrimSpace(string(data)), "runc")
	case strings.HasPrefix(starter, "conmon"): // or conmonrs
		if a.Runtime = cmp.Or(setting(arguments, "-r", ""), setting(arguments, "--runtime", "")); a.Runtime == "" {
			err = errors.New("its command line names no runtime")
		} else {
			a.Through, software, err = s.hook()
		}
	default:
		err = errors.New("it is none of the programs that containerd, CRI-O and Docker start containers with")
	}
	if err != nil {
		return a, fmt.Errorf("find out which runtime started this container from process %d (%s): %w", s.PID, starter, err)
	}
	if strings.HasPrefix(filepath.Base(a.Runtime), program) {
		a.Through, software = a.Runtime, a.Runtime
	}
	for _, handler := range handlers {
		if strings.Contains(handler, "nvidia") {
			a.Handlers = append(a.Handlers, handler)
		}
	}
	if a.Through != "" || len(a.Handlers) > 0 {
		if a.Config, a.Accepts, err = s.accepts(software); err != nil {
			return a, err
		}
	}
	if a.Injector, err = s.injector(); a.Open() {
		return a, nil
	}
	return a, cmp.Or(err, a.uncertain(handlers, strings.HasPrefix(starter, "conmon")))
}

// uncertain is why nothing that was found says that containers have GPUs through claims only.
func (a Access) uncertain(handlers []string, crio bool) error {
	switch {
	case handlers == nil:
		return errors.New("the container runtime does not tell the kubelet which handlers it has, of which one may be NVIDIA's: " +
			"containerd tells it from 2.0 on, and CRI-O from 1.30 on")
	case a.Trusted == nil && (crio || a.Through != "" || len(a.Handlers) > 0):
		return errors.New("CRI-O, and NVIDIA's runtime where it gets the annotations of pods, give containers the CDI devices that these name, " +
			"and no admission policy is known to refuse them: set the chart's annotationPolicy.create=true")
	}
	return nil
}

var errNoWords = errors.New("it is empty")

func (s Starter) path(name string) string { return filepath.Join(s.Proc, strconv.Itoa(s.PID), name) }

// words reads a file of the process that separates words by NUL.
func (s Starter) words(name string) ([]string, error) {
	data, err := os.ReadFile(s.path(name))
	if err != nil {
		return nil, err
	}
	words := strings.Split(string(bytes.TrimRight(data, "\x00")), "\x00")
	if words[0] == "" {
		return nil, fmt.Errorf("%s: %w", s.path(name), errNoWords)
	}
	return words, nil
}

// hook finds NVIDIA's hook among those that CRI-O runs for all containers, and the program that it runs.
func (s Starter) hook() (file, software string, err error) {
	for _, folder := range []string{"/usr/share/containers/oci/hooks.d", "/etc/containers/oci/hooks.d"} {
		within, err := host.PathIn(s.path("root"), folder)
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

// Where NVIDIA's software finds its configuration. The container that installs it puts one beside it, and a script that names
// it in its place.
const (
	systemConfig   = "/etc/" + config.RelativeFilePath
	operatorFolder = "/usr/local/nvidia/toolkit"
)

// accepts reads the option where NVIDIA's software would, or in all the usual places where it is not known which program runs.
func (s Starter) accepts(software string) (path string, accepts bool, err error) {
	for _, file := range s.configs(software) {
		within, err := host.PathIn(s.path("root"), file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			accepts, err = readOption(within)
		}
		if err != nil {
			return file, false, fmt.Errorf("read the configuration of NVIDIA's container runtime in %s: %w", file, err)
		}
		if path = file; accepts || software != "" {
			break
		}
	}
	if path == "" {
		return systemConfig, true, nil // its defaults hold
	}
	return path, accepts, nil
}

func readOption(file string) (bool, error) {
	settings, err := config.New(config.WithConfigFile(file), config.WithRequired(true))
	if err != nil {
		return false, err
	}
	value := settings.GetDefault(option, true)
	accepts, isBool := value.(bool)
	if !isBool {
		return false, fmt.Errorf("%s is %v, want true or false", option, value)
	}
	return accepts, nil
}

// configs are the paths where the configuration may be, the one that counts first.
func (s Starter) configs(software string) []string {
	beside := func(folder string) string { return filepath.Join(folder, ".config", config.RelativeFilePath) }
	if software == "" {
		return []string{beside(operatorFolder), systemConfig}
	}
	var paths []string
	if filepath.IsAbs(software) {
		paths = append(paths, beside(filepath.Dir(software)))
	}
	// The program has the environment of the process that starts it. Where that cannot be read the usual places are left.
	variables, _ := s.words("environ")
	if file := setting(variables, config.FilePathOverrideEnvVar, ""); file != "" {
		paths = append(paths, file)
	}
	if folder := setting(variables, "XDG_CONFIG_HOME", ""); folder != "" {
		paths = append(paths, filepath.Join(folder, config.RelativeFilePath))
	}
	return append(paths, systemConfig)
}
