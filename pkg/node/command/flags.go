// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package command

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/partage-dev/partage/pkg/node/host"
)

// verbosityFlag has a variable that is not named after it.
const verbosityFlag = "v"

// EnvName returns the environment variable that a flag falls back to: NODE_NAME for
// node-name.
func EnvName(flag string) string {
	if flag == verbosityFlag {
		return "LOG_LEVEL"
	}
	return strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// Env returns EnvName as the source of a flag's value.
func Env(flag string) cli.ValueSourceChain { return cli.EnvVars(EnvName(flag)) }

// String returns a flag with a text.
func String(category, name, value string, destination *string, usage string) cli.Flag {
	return &cli.StringFlag{Name: name, Category: category, Value: value, Destination: destination, Usage: usage, Sources: Env(name)}
}

// Int returns a flag with a whole number.
func Int(category, name string, value int, destination *int, usage string) cli.Flag {
	return &cli.IntFlag{Name: name, Category: category, Value: value, Destination: destination, Usage: usage, Sources: Env(name)}
}

// Bool returns a flag that is true or false.
func Bool(category, name string, value bool, destination *bool, usage string) cli.Flag {
	return &cli.BoolFlag{Name: name, Category: category, Value: value, Destination: destination, Usage: usage, Sources: Env(name)}
}

// Duration returns a flag with a time.
func Duration(category, name string, value time.Duration, destination *time.Duration, usage string) cli.Flag {
	return &cli.DurationFlag{Name: name, Category: category, Value: value, Destination: destination, Usage: usage, Sources: Env(name)}
}

const seLinuxFlag = "selinux-context"

// SELinux returns the flag for the SELinux context of file systems that containers use.
func SELinux(category string, destination *string) cli.Flag {
	return String(category, seLinuxFlag, host.SELinuxAuto, destination,
		"SELinux context of the file systems in memory that containers get: "+host.SELinuxAuto+", that of containers' files where SELinux is enabled; "+
			host.SELinuxNone+", what the node's policy says; or a context")
}

// CheckSELinux refuses what is not a value of that flag. Empty is for commands without it.
func CheckSELinux(value string) error {
	return Check(seLinuxFlag, value, value == "" || host.ValidSELinux(value),
		host.SELinuxAuto+", "+host.SELinuxNone+" or a context such as system_u:object_r:container_file_t:s0")
}

// Check refuses a value of a flag unless it is right.
func Check(flag string, value any, right bool, want string) error {
	if right {
		return nil
	}
	return Wrong(flag, value, want)
}

// Wrong returns the error for a flag with a wrong value: it names the flag, its
// variable, the value and what would be right.
func Wrong(flag string, value any, want string) error {
	return fmt.Errorf("--%s (%s) is %q: want %s", flag, EnvName(flag), fmt.Sprint(value), want)
}

// CheckDirectory refuses a path that is not absolute, or not a directory. The
// directory may be absent unless it must exist.
func CheckDirectory(flag, path string, mustExist bool) error {
	if !filepath.IsAbs(path) {
		return Wrong(flag, path, "an absolute path")
	}
	info, err := os.Stat(path)
	absent := errors.Is(err, os.ErrNotExist) && !mustExist
	return Check(flag, path, absent || err == nil && info.IsDir(), "a directory that exists")
}

// CheckDevRoot refuses a value of the flag "dev-root" that is neither host.AutoDev nor a
// directory. The directory may be absent.
func CheckDevRoot(value string) error {
	if !filepath.IsAbs(value) {
		return Check("dev-root", value, value == host.AutoDev, host.AutoDev+" or an absolute path")
	}
	return CheckDirectory("dev-root", value, false)
}

// CheckPath refuses a path that is neither absolute nor empty. The file may be absent.
func CheckPath(flag, path string) error {
	return Check(flag, path, path == "" || filepath.IsAbs(path), "an absolute path, or nothing")
}

// CheckProgram refuses a path that is not absolute, or not a program.
func CheckProgram(flag, path string) error {
	if !filepath.IsAbs(path) {
		return Wrong(flag, path, "an absolute path")
	}
	info, err := os.Stat(path)
	return Check(flag, path, err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0, "a program that exists and may be executed")
}

// CheckDuration refuses a time outside of a range.
func CheckDuration(flag string, value, shortest, longest time.Duration) error {
	return Check(flag, value, shortest <= value && value <= longest, fmt.Sprintf("a time from %s to %s", shortest, longest))
}

// InEffect returns the names and values of a command's flags, for the log.
func InEffect(cmd *cli.Command) []any {
	var pairs []any
	for _, flag := range cmd.Flags {
		if name := flag.Names()[0]; name != "help" {
			pairs = append(pairs, name, cmd.Value(name))
		}
	}
	return pairs
}
