// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import "strings"

// command is a parsed command line.
type command struct {
	verb  string   // key of verbs, or "help"
	value string   // of -c, -mig, -cgi, --set-timeslice, --query-…
	ids   []string // of -i; empty: all GPUs

	format string // of --format

	instances []string // of -gi; empty: all
	computes  []string // of -ci; empty: all
	compute   bool     // -C
}

// option is what an option means within a subcommand.
type option struct {
	verb  string
	value bool // takes a value
}

// options by subcommand; the empty one is nvidia-smi itself.
var options = map[string]map[string]option{
	"": {
		"--query-gpu": {"--query-gpu", true}, "--query-compute-apps": {"--query-compute-apps", true},
		"--format": {"--format", true},
		"-L":       {"-L", false}, "--list-gpus": {"-L", false},
		"-q": {"-q", false}, "--query": {"-q", false},
		"-c": {"-c", true}, "--compute-mode": {"-c", true},
		"-mig": {"-mig", true}, "--multi-instance-gpu": {"-mig", true},
		"-r": {"-r", false}, "--gpu-reset": {"-r", false},
		"--version": {"--version", false},
	},
	"mig": {
		"-lgip": {"-lgip", false}, "--list-gpu-instance-profiles": {"-lgip", false},
		"-lgipp": {"-lgipp", false}, "--list-gpu-instance-possible-placements": {"-lgipp", false},
		"-lgi": {"-lgi", false}, "--list-gpu-instances": {"-lgi", false},
		"-lci": {"-lci", false}, "--list-compute-instances": {"-lci", false},
		"-cgi": {"-cgi", true}, "--create-gpu-instance": {"-cgi", true},
		"-C": {"-C", false}, "--default-compute-instance": {"-C", false},
		"-dgi": {"-dgi", false}, "--destroy-gpu-instance": {"-dgi", false},
		"-dci": {"-dci", false}, "--destroy-compute-instance": {"-dci", false},
		"-gi": {"-gi", true}, "--gpu-instance-id": {"-gi", true},
		"-ci": {"-ci", true}, "--compute-instance-id": {"-ci", true},
	},
	"topo": {
		"-m": {"-m", false}, "--matrix": {"-m", false},
	},
	"compute-policy": {
		"-l": {"-l", false}, "--list": {"-l", false},
		"--set-timeslice": {"--set-timeslice", true},
	},
}

// parse reads a command line. A value follows its option as the next argument
// or after "=".
func parse(args []string) (*command, error) {
	sub := ""
	if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
		sub, args = args[0], args[1:]
	}
	known, ok := options[sub]
	if !ok {
		return nil, errCombination
	}
	c := &command{}
	for len(args) > 0 {
		verb, value, rest, err := next(known, args)
		if err != nil {
			return nil, err
		}
		args = rest
		switch {
		case verb == "help":
			return &command{verb: "help"}, nil
		case c.limit(verb, value):
		case c.verb != "":
			return nil, errCombination
		default:
			c.verb, c.value = verb, value
		}
	}
	if c.verb == "" && sub == "" {
		c.verb = "summary"
	}
	return c, c.check()
}

// limit takes an option that says on what the verb works, or how.
func (c *command) limit(option, value string) bool {
	list := map[string]*[]string{"-i": &c.ids, "-gi": &c.instances, "-ci": &c.computes}[option]
	switch {
	case option == "-C":
		c.compute = true
	case option == "--format":
		c.format = value
	case list == nil:
		return false
	default:
		*list = append(*list, strings.Split(value, ",")...)
	}
	return true
}

// check fails for options that do not go with the verb.
func (c *command) check() error {
	queries := strings.HasPrefix(c.verb, "--query-")
	switch {
	case c.verb == "",
		queries != (c.format != ""),
		c.compute && c.verb != "-cgi",
		c.instances != nil && c.verb != "-dgi" && c.verb != "-dci",
		c.computes != nil && c.verb != "-dci":
		return errCombination
	}
	return nil
}

var errCombination = fail(exitUsage, "Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.")

// common are the options of every subcommand.
var common = map[string]option{
	"-h": {"help", false}, "--help": {"help", false},
	"-i": {"-i", true}, "--id": {"-i", true},
}

// next takes one option, and its value if it has one, off the arguments.
func next(known map[string]option, args []string) (verb, value string, rest []string, err error) {
	name, value, hasValue := strings.Cut(args[0], "=")
	rest = args[1:]
	o, ok := common[name]
	if !ok {
		o, ok = known[name]
	}
	switch {
	case !ok:
		return "", "", nil, fail(exitUsage, "Option \"%s\" is not recognized. Please run 'nvidia-smi -h'.", name)
	case hasValue && !o.value:
		return "", "", nil, fail(exitUsage, "Option \"%s\" takes no argument. Please run 'nvidia-smi -h'.", name)
	case hasValue || !o.value:
		return o.verb, value, rest, nil
	case len(rest) == 0:
		return "", "", nil, fail(exitUsage, "Option \"%s\" requires an argument. Please run 'nvidia-smi -h'.", name)
	}
	return o.verb, rest[0], rest[1:], nil
}
