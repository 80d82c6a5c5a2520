// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package snippet

import (
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"

	"mvdan.cc/sh/v3/syntax"
)

// shells are the languages of blocks that have commands. One without a language may show some.
var shells = []string{"sh", "bash", "console", ""}

// Command is a command of a page, or one that another command runs, such as what follows
// "kubectl exec POD --".
type Command struct {
	Where string
	Page  string
	Args  []string
}

func (c Command) String() string { return fmt.Sprintf("%s: %s", c.Where, strings.Join(c.Args, " ")) }

// Program is the last part of the program's path.
func (c Command) Program() string { return path.Base(c.Args[0]) }

// Commands returns the commands of all blocks of a page, and those in lines of text that begin
// with one of the programs.
func Commands(page, content string, programs ...string) ([]Command, error) {
	var all []Command
	for _, b := range Blocks(page, content, shells...) {
		script := b.Text
		switch b.Language {
		case "console":
			script = typed(script, "$#")
		case "":
			script = typed(script, "$")
		}
		commands, err := parse(page, b.String(), script)
		if err != nil {
			return nil, err
		}
		all = append(all, commands...)
	}
	text := fence.ReplaceAllStringFunc(content, func(block string) string { return strings.Repeat("\n", strings.Count(block, "\n")) })
	for _, at := range span.FindAllStringSubmatchIndex(text, -1) {
		code := strings.Join(strings.Fields(text[at[2]:at[3]]), " ")
		first, rest, _ := strings.Cut(code, " ")
		if rest == "" || !slices.Contains(programs, first) || strings.ContainsAny(code, "…<") {
			continue
		}
		commands, err := parse(page, fmt.Sprintf("%s:%d", page, strings.Count(text[:at[0]], "\n")+1), code)
		if err != nil {
			return nil, err
		}
		all = append(all, commands...)
	}
	return all, nil
}

// All returns the commands of all pages whose program is of that name, in blocks and in the text.
func All(root, program string) ([]Command, error) {
	pages, err := Pages(root)
	if err != nil {
		return nil, err
	}
	var all []Command
	for page, content := range pages {
		// What earlier versions had is no error in a changelog.
		if page == "CHANGELOG.md" {
			continue
		}
		commands, err := Commands(page, content, program, "kubectl", "bin/cluster")
		if err != nil {
			return nil, err
		}
		for _, c := range commands {
			if c.Program() == program {
				all = append(all, c)
			}
		}
	}
	return all, nil
}

// Unfinished reports whether an error is about a flag whose value a page leaves out, as in
// "with --policy-file".
func Unfinished(err error) bool {
	return err != nil && strings.Contains(err.Error(), "flag needs an argument")
}

// typed returns the lines of a session that begin with a prompt, that of a user or of root, and
// those they go on in.
func typed(session, prompts string) string {
	var script strings.Builder
	goesOn := false
	for line := range strings.Lines(session) {
		line = strings.TrimSuffix(line, "\n")
		if len(line) > 2 && strings.Contains(prompts, line[:1]) && line[1] == ' ' {
			line = line[2:]
		} else if !goesOn {
			continue
		}
		goesOn = strings.HasSuffix(line, `\`)
		script.WriteString(line + "\n")
	}
	return script.String()
}

func parse(page, where, script string) ([]Command, error) {
	file, err := syntax.NewParser(syntax.Variant(syntax.LangBash)).Parse(strings.NewReader(script), where)
	if err != nil {
		return nil, fmt.Errorf("parse the commands at %s: %w", where, err)
	}
	var all []Command
	syntax.Walk(file, func(node syntax.Node) bool {
		call, is := node.(*syntax.CallExpr)
		if !is || len(call.Args) == 0 {
			return true
		}
		args := make([]string, 0, len(call.Args))
		for _, word := range call.Args {
			args = append(args, value(word.Parts))
		}
		for args := range unwrap(args) {
			all = append(all, Command{Where: where, Page: page, Args: args})
		}
		return true
	})
	return all, nil
}

// value is a word as the program gets it. What only a shell knows is a word in capitals,
// like the placeholders of the pages.
func value(parts []syntax.WordPart) string {
	var b strings.Builder
	for _, part := range parts {
		switch p := part.(type) {
		case *syntax.Lit:
			b.WriteString(strings.ReplaceAll(p.Value, `\`, ""))
		case *syntax.SglQuoted:
			b.WriteString(p.Value)
		case *syntax.DblQuoted:
			b.WriteString(value(p.Parts))
		default:
			b.WriteString("VALUE")
		}
	}
	return b.String()
}

// unwrap yields a command and the one that it runs.
func unwrap(args []string) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		for len(args) > 0 {
			switch inner := slices.Index(args, "--"); {
			case args[0] == "sudo" || args[0] == "env" || isAssignment(args[0]):
				args = args[1:]
			case inner > 0 && runsOther(args[:inner]):
				if !yield(args[:inner]) {
					return
				}
				args = args[inner+1:]
			default:
				yield(args)
				return
			}
		}
	}
}

func runsOther(args []string) bool {
	switch path.Base(args[0]) {
	case "kubectl":
		return slices.Contains(args, "exec") || slices.Contains(args, "debug")
	case "cluster":
		return slices.Contains(args, "run")
	}
	return false
}

var assignment = regexp.MustCompile(`^[A-Z_a-z]+=`)

func isAssignment(arg string) bool { return assignment.MatchString(arg) }
