// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package terraform reads the part of Terraform's language that configurations are written
// in: blocks, attributes and literal values. Nothing is evaluated; an expression stays one.
//
// The result are the nodes that a YAML document with the same content would have, so that
// one reader takes both.
package terraform

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/partage-dev/partage/pkg/util/quote"
)

const (
	// ExpressionTag is the tag of a value that would have to be evaluated.
	ExpressionTag = "!expression"
	maxDepth      = 64
	maxLabels     = 8
)

// Parse reads a file. A block with labels, as in resource "type" "name" {…}, is an object in
// an object for each label; several blocks of one name are a list.
func Parse(data []byte) (*yaml.Node, error) {
	if !utf8.Valid(data) {
		return nil, errors.New("is no text in UTF-8")
	}
	p := &parser{text: string(data), line: 1}
	body, err := p.body(0, false)
	if err != nil {
		return nil, fmt.Errorf("line %d: %w", p.line, err)
	}
	return body, nil
}

// parser has read the text up to at.
type parser struct {
	text string
	at   int
	line int
}

// body reads attributes and blocks up to the end of the file, or to a closing brace.
func (p *parser) body(depth int, braced bool) (*yaml.Node, error) {
	if depth > maxDepth {
		return nil, fmt.Errorf("blocks are nested more than %d deep", maxDepth)
	}
	body := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: p.line}
	for {
		if err := p.space(true); err != nil {
			return nil, err
		}
		switch {
		case p.done() && braced:
			return nil, errors.New("a closing } is missing")
		case p.done():
			return body, nil
		case braced && p.take("}"):
			return body, nil
		}
		line := p.line
		name, err := p.name()
		if err != nil {
			return nil, err
		}
		if err := p.space(false); err != nil {
			return nil, err
		}
		if p.isAssignment() {
			p.at++
			if get(body, name) != nil {
				return nil, fmt.Errorf("%s is given more than once", quote.Name(name))
			}
			value, err := p.value(depth + 1)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", quote.Name(name), err)
			}
			add(body, name, value, line)
			continue
		}
		if err := p.block(body, name, line, depth); err != nil {
			return nil, err
		}
	}
}

// isAssignment reports whether an attribute's = comes next, and not ==.
func (p *parser) isAssignment() bool {
	return strings.HasPrefix(p.text[p.at:], "=") && !strings.HasPrefix(p.text[p.at:], "==")
}

// block reads a block's labels and body.
func (p *parser) block(into *yaml.Node, name string, line, depth int) error {
	names := []string{name}
	for !p.take("{") {
		if p.done() || len(names) > maxLabels {
			return fmt.Errorf("after %s: want = and a value, or a block in braces", quote.Name(name))
		}
		label, err := p.label()
		if err != nil {
			return fmt.Errorf("after %s: want = and a value, or a block in braces: %w", quote.Name(name), err)
		}
		names = append(names, label)
		if err := p.space(false); err != nil {
			return err
		}
	}
	body, err := p.body(depth+1, true)
	if err != nil {
		return err
	}
	for _, outer := range names[:len(names)-1] {
		inner := get(into, outer)
		if inner == nil {
			inner = &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: line}
			add(into, outer, inner, line)
		}
		if inner.Kind != yaml.MappingNode {
			return fmt.Errorf("%s has blocks with and without labels", quote.Name(outer))
		}
		into = inner
	}
	last := names[len(names)-1]
	switch before := get(into, last); {
	case before == nil:
		add(into, last, body, line)
	case before.Kind == yaml.SequenceNode:
		before.Content = append(before.Content, body)
	case before.Kind == yaml.MappingNode:
		first := *before
		*before = yaml.Node{Kind: yaml.SequenceNode, Tag: "!!seq", Line: first.Line, Content: []*yaml.Node{&first, body}}
	default:
		return fmt.Errorf("%s is given both as a value and as a block", quote.Name(last))
	}
	return nil
}

func add(body *yaml.Node, name string, value *yaml.Node, line int) {
	body.Content = append(body.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name, Line: line}, value)
}

func get(body *yaml.Node, name string) *yaml.Node {
	for i := 0; i+1 < len(body.Content); i += 2 {
		if body.Content[i].Value == name {
			return body.Content[i+1]
		}
	}
	return nil
}

func (p *parser) done() bool { return p.at >= len(p.text) }

// take goes on behind a text if it comes next.
func (p *parser) take(text string) bool {
	if !strings.HasPrefix(p.text[p.at:], text) {
		return false
	}
	p.at += len(text)
	return true
}

// skip goes on by n bytes, which may have line ends in them.
func (p *parser) skip(n int) {
	p.line += strings.Count(p.text[p.at:p.at+n], "\n")
	p.at += n
}

// space skips blanks and comments, and the ends of lines if they mean nothing here.
func (p *parser) space(lines bool) error {
	for !p.done() {
		rest := p.text[p.at:]
		switch {
		case rest[0] == ' ' || rest[0] == '\t' || rest[0] == '\r' || rest[0] == '\n' && lines:
			p.skip(1)
		case rest[0] == '#' || strings.HasPrefix(rest, "//"):
			end := strings.IndexByte(rest, '\n')
			if end < 0 {
				end = len(rest)
			}
			p.skip(end)
		case strings.HasPrefix(rest, "/*"):
			end := strings.Index(rest, "*/")
			if end < 0 {
				return errors.New("a comment has no end, */")
			}
			p.skip(end + len("*/"))
		default:
			return nil
		}
	}
	return nil
}

// name reads an identifier.
func (p *parser) name() (string, error) {
	rest := p.text[p.at:]
	end := strings.IndexFunc(rest, func(r rune) bool { return r != '_' && r != '-' && !unicode.IsLetter(r) && !unicode.IsDigit(r) })
	if end < 0 {
		end = len(rest)
	}
	first, _ := utf8.DecodeRuneInString(rest)
	if end == 0 || !unicode.IsLetter(first) && first != '_' {
		return "", fmt.Errorf("want a name, found %s", p.near())
	}
	p.at += end
	return rest[:end], nil
}

// label reads a block's label, or the key of an object.
func (p *parser) label() (string, error) {
	if !strings.HasPrefix(p.text[p.at:], `"`) {
		return p.name()
	}
	text, literal, err := p.quoted()
	if err == nil && !literal {
		err = fmt.Errorf("want a plain string, found an expression before %s", p.near())
	}
	return text, err
}

// near returns what comes next, for messages.
func (p *parser) near() string {
	if p.done() {
		return "the end of the file"
	}
	rest, _, _ := strings.Cut(p.text[p.at:], "\n")
	return quote.Text(rest)
}
