// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package terraform

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"
)

var (
	number  = regexp.MustCompile(`^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?`)
	heredoc = regexp.MustCompile(`^<<-?([A-Za-z_][A-Za-z0-9_]*)[ \t\r]*\n`)
)

// value reads a literal, a list, an object, or an expression, which is not evaluated.
func (p *parser) value(depth int) (*yaml.Node, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("values are nested more than %d deep", maxDepth)
	}
	if err := p.space(false); err != nil {
		return nil, err
	}
	start, line := p.at, p.line
	n, err := p.literal(depth)
	if err != nil {
		return nil, err
	}
	if n != nil {
		ends, err := p.ends()
		if err != nil || ends {
			n.Line = line
			return n, err
		}
	}
	p.at, p.line = start, line
	return p.expression()
}

// literal returns nil for what is none. It may be followed by an operator, with which it is
// a part of an expression.
func (p *parser) literal(depth int) (*yaml.Node, error) {
	rest := p.text[p.at:]
	switch {
	case strings.HasPrefix(rest, `"`):
		text, literal, err := p.quoted()
		if err != nil || !literal {
			return nil, err
		}
		return scalar("!!str", text), nil
	case p.take("["):
		return p.list(depth)
	case p.take("{"):
		return p.object(depth)
	}
	if text := number.FindString(rest); text != "" {
		p.at += len(text)
		if strings.ContainsAny(text, ".eE") {
			return scalar("!!float", text), nil
		}
		return scalar("!!int", text), nil
	}
	name, err := p.name()
	switch {
	case err != nil:
		return nil, nil //nolint:nilnil,nilerr // It is no literal, but it may be an expression.
	case name == "true" || name == "false":
		return scalar("!!bool", name), nil
	case name == "null":
		return scalar("!!null", name), nil
	}
	return nil, nil //nolint:nilnil // As above.
}

func scalar(tag, value string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: value}
}

// ends reports whether a value is over.
func (p *parser) ends() (bool, error) {
	if err := p.space(false); err != nil {
		return false, err
	}
	return p.done() || strings.ContainsRune("\n,]}", rune(p.text[p.at])), nil
}

func (p *parser) list(depth int) (*yaml.Node, error) {
	list := &yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq"}
	for {
		if err := p.space(true); err != nil {
			return nil, err
		}
		if p.take("]") {
			return list, nil
		}
		if p.isFor() {
			return nil, p.balanced(1)
		}
		item, err := p.value(depth + 1)
		if err != nil {
			return nil, err
		}
		list.Content = append(list.Content, item)
		if err := p.space(true); err != nil {
			return nil, err
		}
		if !p.take(",") && !strings.HasPrefix(p.text[p.at:], "]") {
			return nil, fmt.Errorf("in a list: want , or ], found %s", p.near())
		}
	}
}

// isFor reports whether a list or object is computed.
func (p *parser) isFor() bool {
	rest := p.text[p.at:]
	return strings.HasPrefix(rest, "for ") || strings.HasPrefix(rest, "for\t")
}

func (p *parser) object(depth int) (*yaml.Node, error) {
	object := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map"}
	for {
		if err := p.space(true); err != nil {
			return nil, err
		}
		if p.take("}") {
			return object, nil
		}
		if p.isFor() || strings.HasPrefix(p.text[p.at:], "(") {
			return nil, p.balanced(1)
		}
		line := p.line
		key, err := p.label()
		if err != nil {
			return nil, err
		}
		if err := p.space(false); err != nil {
			return nil, err
		}
		if !p.take("=") && !p.take(":") {
			return nil, fmt.Errorf("in an object, after the key %q: want = and a value, found %s", key, p.near())
		}
		if get(object, key) != nil {
			return nil, fmt.Errorf("%q is given more than once", key)
		}
		value, err := p.value(depth + 1)
		if err != nil {
			return nil, fmt.Errorf("%q: %w", key, err)
		}
		add(object, key, value, line)
		if err := p.space(false); err != nil {
			return nil, err
		}
		p.take(",")
	}
}

// expression takes what cannot be understood up to where the value ends.
func (p *parser) expression() (*yaml.Node, error) {
	start, line := p.at, p.line
	if err := p.balanced(0); err != nil {
		return nil, err
	}
	text := strings.TrimSpace(p.text[start:p.at])
	if text == "" {
		return nil, fmt.Errorf("want a value, found %s", p.near())
	}
	n := scalar(ExpressionTag, text)
	n.Line = line
	return n, nil
}

// balanced goes on to the end of an expression, of which some brackets are open. With none it
// ends before the end of the line and before what closes the list or block that it is in.
func (p *parser) balanced(open int) error {
	within := open > 0
	for !p.done() {
		if open == 0 && p.endsHere() {
			return nil
		}
		skipped, err := p.opaque()
		if err != nil {
			return err
		}
		if skipped {
			continue
		}
		rest := p.text[p.at:]
		switch c := rest[0]; {
		case strings.IndexByte("([{", c) >= 0:
			open++
		case strings.IndexByte(")]}", c) >= 0:
			open--
		}
		_, size := utf8.DecodeRuneInString(rest)
		p.skip(size)
		if open == 0 && within {
			return nil
		}
	}
	if open > 0 {
		return errors.New("a closing bracket is missing")
	}
	return nil
}

// endsHere reports whether an expression without open brackets is over.
func (p *parser) endsHere() bool {
	rest := p.text[p.at:]
	return strings.IndexByte(")]}\n,#", rest[0]) >= 0 || strings.HasPrefix(rest, "//")
}

// opaque goes on behind a text or a comment, in which brackets mean nothing.
func (p *parser) opaque() (bool, error) {
	rest := p.text[p.at:]
	if at := heredoc.FindStringSubmatchIndex(rest); at != nil {
		return true, p.heredoc(rest, at[1], rest[at[2]:at[3]])
	}
	switch {
	case rest[0] == '"':
		_, _, err := p.quoted()
		return true, err
	case rest[0] == '#' || strings.HasPrefix(rest, "//") || strings.HasPrefix(rest, "/*"):
		return true, p.space(false)
	}
	return false, nil
}

// heredoc goes on behind a text that ends with a line of its own.
func (p *parser) heredoc(rest string, from int, word string) error {
	at := from
	for at < len(rest) {
		line, _, more := strings.Cut(rest[at:], "\n")
		if strings.TrimSpace(line) == word {
			p.skip(at + len(line))
			return nil
		}
		if at += len(line); more {
			at++
		}
	}
	return fmt.Errorf("the text after <<%s has no end", word)
}

// quoted reads a string in quotes, and reports whether it is literal: without a template.
func (p *parser) quoted() (text string, literal bool, err error) {
	literal = true
	var out strings.Builder
	p.at++
	for !p.done() {
		rest := p.text[p.at:]
		switch {
		case rest[0] == '"':
			p.at++
			return out.String(), literal, nil
		case rest[0] == '\n':
			return "", false, errors.New("a string has no end, \", in its line")
		case strings.HasPrefix(rest, "$${") || strings.HasPrefix(rest, "%%{"):
			out.WriteString(rest[1:3])
			p.at += 3
		case strings.HasPrefix(rest, "${") || strings.HasPrefix(rest, "%{"):
			literal = false
			p.at += 2
			if err := p.balanced(1); err != nil {
				return "", false, err
			}
		case rest[0] == '\\':
			r, _, tail, err := strconv.UnquoteChar(rest, '"')
			if err != nil {
				return "", false, fmt.Errorf("a string has the unknown escape %s", p.near())
			}
			out.WriteRune(r)
			p.at += len(rest) - len(tail)
		default:
			out.WriteByte(rest[0])
			p.at++
		}
	}
	return "", false, errors.New("a string has no end, \"")
}
