// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package redact

import (
	"bytes"
	"encoding/json"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Lines replaces all secrets in lines of JSON, and keeps them such. A line that was cut off is
// left out.
func (r *Redactor) Lines(text string) (string, error) {
	var out strings.Builder
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	for line := range strings.Lines(text) {
		value, ok := decode(line)
		if !ok {
			continue
		}
		if err := encoder.Encode(r.value(value)); err != nil {
			return "", err
		}
	}
	return out.String(), nil
}

func decode(line string) (any, bool) {
	decoder := json.NewDecoder(bytes.NewReader([]byte(line)))
	decoder.UseNumber() // a float would round numbers of bytes
	var value any
	return value, decoder.Decode(&value) == nil
}

// learnJSON looks for processes in lines of JSON.
func (r *Redactor) learnJSON(text string) {
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "{") {
			continue
		}
		if value, ok := decode(line); ok {
			r.learnValue(value)
		}
	}
}

func (r *Redactor) learnValue(value any) {
	switch v := value.(type) {
	case []any:
		for _, one := range v {
			r.learnValue(one)
		}
	case map[string]any:
		if name, _ := process(v); name != "" {
			if text, ok := v[name].(string); ok {
				r.process(text)
			}
		}
		for _, key := range slices.Sorted(maps.Keys(v)) {
			r.learnValue(v[key])
		}
	}
}

// fixed are the keys of words that a transcript has of its own.
var fixed = []string{"kind", "is", "parts", "took", "event", "version", "time"}

func (r *Redactor) value(value any) any {
	switch v := value.(type) {
	case string:
		return r.Text(v)
	case []any:
		for i := range v {
			v[i] = r.value(v[i])
		}
	case map[string]any:
		name, pid := process(v)
		r.listed(v)
		for _, key := range slices.Sorted(maps.Keys(v)) {
			one := v[key]
			text, isText := one.(string)
			number, isNumber := one.(json.Number)
			switch {
			case slices.Contains(fixed, key):
			case key == name && isText:
				v[key] = r.process(text)
			case key == pid && isNumber:
				v[key] = json.Number(strconv.Itoa(r.pid(number.String())))
			default:
				v[key] = r.value(one)
			}
		}
	}
	return value
}

// firstProgram is a question whose answer is the name of a process.
const firstProgram = "program of process 1"

// listed replaces process IDs in the answer to a question about processes, and the name of
// the first, in place.
func (r *Redactor) listed(entry map[string]any) {
	question, _ := entry["question"].(string)
	if name, ok := entry["answer"].(string); ok && question == firstProgram {
		entry["answer"] = r.process(name)
	}
	list, _ := entry["answer"].([]any)
	if !strings.HasPrefix(question, "processes ") {
		return
	}
	for i, one := range list {
		if number, ok := one.(json.Number); ok {
			list[i] = json.Number(strconv.Itoa(r.pid(number.String())))
		}
	}
}

// process returns the fields with name and ID of a process, if an object is about one. What
// cuda-probe says about itself is not: it is an event.
func process(object map[string]any) (name, pid string) {
	if _, event := object["event"]; event {
		return "", ""
	}
	for key := range object {
		if strings.EqualFold(key, "pid") {
			pid = key
		}
	}
	if pid == "" {
		return "", ""
	}
	for key := range object {
		if strings.EqualFold(key, "name") {
			name = key
		}
	}
	return name, pid
}
