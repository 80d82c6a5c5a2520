// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/partage-dev/partage/test/gpusim/cuda"
	gpusim "github.com/partage-dev/partage/test/gpusim/mps"
	"github.com/partage-dev/partage/test/gpusim/sysroot"
	"github.com/partage-dev/partage/test/must"
)

// script is how the simulated driver's programs misbehave. It is read anew by every
// program that starts.
type script struct {
	// Exit makes a daemon end at once with this message.
	Exit string `json:"exit,omitempty"`
	// Slow is how long a daemon takes before it listens.
	Slow time.Duration `json:"slow,omitempty"`
	// Stay makes the daemon not react to quit and SIGTERM.
	Stay bool `json:"stay,omitempty"`
	// SlowEnd makes a daemon that was told to quit take a moment between the removal of its
	// sockets and its end.
	SlowEnd bool `json:"slowEnd,omitempty"`
	// NoServer makes servers fail as soon as they are started.
	NoServer bool `json:"noServer,omitempty"`
	// Flood makes a daemon write to its logs without end.
	Flood bool `json:"flood,omitempty"`
	// Away makes servers lead a session of their own.
	Away bool `json:"away,omitempty"`

	// The others change what the daemon seems to answer.

	// Hang: nothing.
	Hang bool `json:"hang,omitempty"`
	// State, Clients and Percentage of its servers.
	State      string `json:"state,omitempty"`
	Clients    []int  `json:"clients,omitempty"`
	Percentage string `json:"percentage,omitempty"`
	// IgnoreDefault and IgnoreServer: limits cannot be set.
	IgnoreDefault bool `json:"ignoreDefault,omitempty"`
	IgnoreServer  bool `json:"ignoreServer,omitempty"`
	// Claim is a PID that it calls its server.
	Claim int `json:"claim,omitempty"`
	// Flap: who has not just set the percentage of a server is told another one.
	Flap bool `json:"flap,omitempty"`
	// NoTermination: no client can be terminated.
	NoTermination bool `json:"noTermination,omitempty"`
	// HangTermination: the termination of this client does not return.
	HangTermination int `json:"hangTermination,omitempty"`
}

// script changes how the driver misbehaves from now on.
func (w *world) script(s script) {
	w.Helper()
	data, err := json.Marshal(s)
	if err == nil {
		err = os.WriteFile(filepath.Join(w.root, "script.tmp"), data, 0o644)
	}
	if err == nil {
		err = os.Rename(filepath.Join(w.root, "script.tmp"), filepath.Join(w.root, "script.json"))
	}
	must.Do(w, err)
}

func readScript() (s script, err error) {
	// The program is at <root>/usr/bin/….
	data, err := os.ReadFile(filepath.Join(filepath.Dir(os.Args[0]), "../../script.json"))
	if err == nil {
		err = json.Unmarshal(data, &s)
	}
	return s, err
}

func runControlDaemon(args []string) error {
	s, err := readScript()
	if err != nil {
		return err
	}
	if s.Exit != "" {
		return errors.New(s.Exit)
	}
	// A start that is slow ends with the process only.
	time.Sleep(s.Slow)
	seen, err := writeSeen(args)
	if err != nil {
		return err
	}
	defer func() { _ = seen.Close() }()
	d, err := gpusim.StartDaemon(gpusim.DaemonOptions{MultiUser: slices.Contains(args, "-multiuser-server"), Log: os.Stderr})
	if err != nil {
		return err
	}
	if s.Flood {
		go flood(os.Stdout)
		for _, name := range []string{"control.log", "server.log"} {
			// Nobody knows whether NVIDIA's appends.
			file, err := os.OpenFile(filepath.Join(os.Getenv("CUDA_MPS_LOG_DIRECTORY"), name), os.O_WRONLY|os.O_CREATE, 0o600)
			if err != nil {
				return err
			}
			go flood(file)
		}
	}
	if s.Stay {
		signal.Ignore(syscall.SIGTERM)
	} else {
		signals := terminated()
		go func() {
			<-signals
			d.Stop()
		}()
	}
	d.Serve()
	if s.SlowEnd {
		// How long this takes is its own affair.
		time.Sleep(300 * time.Millisecond)
	}
	return nil
}

// flood writes 20 MB a second.
func flood(log *os.File) {
	line := []byte(strings.Repeat("line\n", 20_000))
	for range time.Tick(5 * time.Millisecond) {
		_, _ = log.Write(line)
	}
}

// writeSeen tells the test what a daemon sees, in a file that it keeps open, as servers do with their memory.
func writeSeen(args []string) (_ *os.File, err error) {
	seen := map[string]string{"args": strings.Join(args, " ")}
	for _, name := range []string{"CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH"} {
		seen[name] = os.Getenv(name)
	}
	data, err := json.Marshal(seen)
	if err != nil {
		return nil, err
	}
	file, err := os.OpenFile("/dev/shm/seen.json", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = file.Write(data)
	}
	return file, err
}

// runControlClient passes commands on, one by one, unless the script has the answer.
func runControlClient() error {
	s, err := readScript()
	if err != nil {
		return err
	}
	if s.Hang {
		<-terminated()
		return nil
	}
	var failed error
	set := false
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		set = set || strings.HasPrefix(lines.Text(), "set_")
		switch words := lines.Text(); {
		case s.Flap && !set && strings.HasPrefix(words, "get_active_thread_percentage"):
			fmt.Println("50")
			continue
		case s.HangTermination != 0 && strings.HasPrefix(words, "terminate_client") && strings.HasSuffix(words, " "+strconv.Itoa(s.HangTermination)):
			<-terminated()
			return nil
		case s.NoTermination && strings.HasPrefix(words, "terminate_client"):
			fmt.Println("1")
			continue
		}
		command, answer, known := s.translate(lines.Text())
		if known {
			if answer != "" {
				fmt.Println(answer)
			}
			continue
		}
		err := gpusim.Control(context.Background(), gpusim.PipeDirectory(), strings.NewReader(command+"\n"), os.Stdout)
		if err != nil && !errors.Is(err, gpusim.ErrCommand) {
			return err
		}
		failed = errors.Join(failed, err)
	}
	return failed
}

// translate returns the answer to a command, if it is known, or the command to give
// to the daemon.
func (s script) translate(line string) (command, answer string, known bool) {
	words := strings.Fields(line)
	if len(words) == 0 {
		return "", "", true
	}
	limit := strings.HasSuffix(words[0], "active_thread_percentage") || strings.HasSuffix(words[0], "device_pinned_mem_limit")
	set, ofDefault := strings.HasPrefix(words[0], "set_"), strings.Contains(words[0], "_default_")
	ofClaimed := s.Claim != 0 && len(words) > 1 && words[1] == strconv.Itoa(s.Claim)
	switch {
	case words[0] == "quit" && s.Stay:
		return "", "", true
	case words[0] == "get_server_list" && s.Claim != 0:
		return "", strconv.Itoa(s.Claim), true
	case words[0] == "get_server_status" && s.State != "":
		return "", s.State, true
	case words[0] == "get_server_status" && ofClaimed:
		return "", "ACTIVE", true
	case words[0] == "get_client_list" && (len(s.Clients) > 0 || ofClaimed):
		return "", strings.Trim(strings.Join(strings.Fields(fmt.Sprint(s.Clients)), "\n"), "[]"), true
	case set && ofDefault && s.IgnoreDefault, set && limit && !ofDefault && s.IgnoreServer:
		return "", "", true
	case words[0] == "get_active_thread_percentage" && s.Percentage != "":
		return "", s.Percentage, true
	case limit && ofClaimed && !ofDefault:
		// As if it were one of the next servers.
		return strings.Join(append([]string{strings.Replace(words[0], "et_", "et_default_", 1)}, words[2:]...), " "), "", false
	}
	return line, "", false
}

func runServer() error {
	s, err := readScript()
	if err != nil {
		return err
	}
	if s.NoServer {
		return errors.New("no server")
	}
	const away = "PARTAGE_TEST_AWAY=1"
	if env := os.Environ(); s.Away && !slices.Contains(env, away) {
		env = append(env, away)
		if _, err := unix.Setsid(); err != nil {
			return err
		}
		return unix.Exec("/proc/self/exe", os.Args, env)
	}
	return gpusim.RunServer()
}

// runClient is a CUDA program in a container that has these two mounted.
func runClient(pipe, shm string) error {
	root := filepath.Join(filepath.Dir(os.Args[0]), "../..")
	m, err := sysroot.Load(root)
	if err != nil {
		return err
	}
	if _, err = gpusim.Connect(context.Background(), gpusim.ClientOptions{Pipe: pipe, Shared: shm, Here: cuda.Here(m, root), Root: root}); err != nil {
		return err
	}
	<-terminated()
	return nil
}
