// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package redact replaces what tells one machine from another, and who works there: host
// and user names, serial numbers, UUIDs, addresses, other people's processes. The same
// thing has the same placeholder everywhere, so that a transcript can still be replayed.
package redact

import (
	"fmt"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// Redactor knows what to replace. It learns that from texts before it changes any.
type Redactor struct {
	words  map[string]string // by what they are, in lower case
	counts map[string]int
	// longest first, so that a name within another one is found after it
	long []string
}

// New returns a Redactor for a machine with these names and users.
func New(hosts, users []string) *Redactor {
	r := &Redactor{words: map[string]string{}, counts: map[string]int{}}
	for _, host := range hosts {
		r.host(host)
	}
	for _, user := range users {
		r.word("USER", user)
	}
	return r
}

func (r *Redactor) host(name string) {
	short, _, _ := strings.Cut(name, ".")
	r.word("HOST", name)
	r.word("HOST", short)
}

// shortest is the least length of a word that is replaced within others, too. A shorter one is
// only replaced where it stands by itself.
const shortest = 6

// common are names that say nothing, or that are also words of NVIDIA's and Kubernetes' texts.
var common = []string{
	"", "/", ".", "enabled", "disabled", "default", "active", "unknown", "localhost", "root", "nobody", "ubuntu", "debian", "nvidia", "user", "none", "n/a", "[n/a]", "gpu", "mps", "cuda", "nvml", "file", "command", "call",
	"driver", "device", "memory", "process", "server", "client", "system", "compute",
}

// word makes a secret known, and returns its placeholder. It is replaced within other words, too.
func (r *Redactor) word(kind, secret string) string {
	key := strings.ToLower(strings.TrimSpace(secret))
	if slices.Contains(common, key) {
		return secret
	}
	if _, known := r.words[key]; !known && len(key) >= shortest {
		r.everywhere(key)
	}
	return r.placeholder(kind, key)
}

func (r *Redactor) everywhere(key string) {
	r.long = append(r.long, key)
	slices.SortFunc(r.long, func(a, b string) int { return len(b) - len(a) })
}

// placeholder returns what stands for a secret.
func (r *Redactor) placeholder(kind, secret string) string {
	key := strings.ToLower(secret)
	if r.words[key] == "" {
		r.counts[kind]++
		r.words[key] = fmt.Sprintf("%s-%d", kind, r.counts[kind])
	}
	return r.words[key]
}

// leastName is what a name has that is learned from texts: less than that identifies nothing.
const leastName = 4

// identity are lines of nvidia-smi -q and of /proc that identify a board, a chassis or a rack.
var identity = regexp.MustCompile(`(?im)^\s*([^:\n]*(?:serial|guid|pdi|board id|board part|cluster ?uuid|asset)[^:\n]*?)\s*:\s*(\S.*?)\s*$`)

// Lines of nvidia-smi -q about a process.
var (
	processID   = regexp.MustCompile(`(?m)^(\s*Process ID\s*:\s*)(\d+)\s*$`)
	processName = regexp.MustCompile(`(?m)^(\s*Name\s*:\s*)(\S.*?)\s*$`)
)

// Learn looks for secrets in what was written about the machine.
func (r *Redactor) Learn(text string) {
	for _, found := range identity.FindAllStringSubmatch(text, -1) {
		if value := found[2]; len(value) >= leastName {
			r.word("ID", value)
		}
	}
	for _, found := range accounts.FindAllStringSubmatch(text, -1) {
		if host := strings.Trim(found[2], ".-"); len(host) >= leastName {
			r.host(host)
		}
	}
	for _, form := range []*regexp.Regexp{accounts, homes} {
		for _, found := range form.FindAllStringSubmatch(text, -1) {
			if user := strings.Trim(found[1], ".-"); len(user) >= leastName {
				r.word("USER", user)
			}
		}
	}
	for _, found := range processName.FindAllStringSubmatch(text, -1) {
		r.process(found[2])
	}
	r.learnJSON(text)
}

// ours are the beginnings of names of programs that nodes with GPUs have, and of this kit's.
var ours = []string{"nvidia-", "nv-", "dcgm", "Xorg", "cuda-probe", "gpu-kubelet-plu", "hardware-run", "systemd"}

// inits are usual first programs of machines and containers.
var inits = []string{"init", "bash", "sh", "sleep", "tini", "dumb-init", "docker-init", "catatonit"}

// process returns what stands for the name of a program of others.
func (r *Redactor) process(name string) string {
	program, _, _ := strings.Cut(name, " ")
	base := filepath.Base(program)
	if slices.Contains(inits, base) || slices.ContainsFunc(ours, func(prefix string) bool { return strings.HasPrefix(base, prefix) }) {
		return name
	}
	placeholder := r.word("PROCESS", base)
	if whole := strings.ToLower(name); r.words[whole] == "" {
		r.words[whole] = placeholder
		r.everywhere(whole)
	}
	return placeholder
}

// What is replaced for its form, whatever taught it.
var (
	accounts = regexp.MustCompile(`([\pL\pN_.+-]+)@([\pL\pN][\pL\pN_.-]*)`)
	homes    = regexp.MustCompile(`/(?:home|Users)/([\pL\pN_.-]+)`)
	uuids    = regexp.MustCompile(`(?i)(^|[^0-9a-z]|pod)(GPU-|MIG-)?([0-9a-f]{8}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{4}[-_]?[0-9a-f]{12})(\b|_)`)
	macs     = regexp.MustCompile(`(?i)\b[0-9a-f]{2}(?:[:-][0-9a-f]{2}){5,19}\b`)
	// rights are long numbers, too, which /proc/self/status has.
	hexadecimal = regexp.MustCompile(`(?m)^(?:Cap\w+:\s*[0-9a-f]+)$|[0-9A-Za-z]+`)
	ipv4        = regexp.MustCompile(`[\w.]*\d\.\d[\w.]*`)
	ipv6        = regexp.MustCompile(`[\w:.]*:[\w:.]*`)
)

var (
	tokens = regexp.MustCompile(`[\pL\pN_.-]+`)
	// kept are paths of the kernel and names of products, in which no name is looked for.
	kept = regexp.MustCompile(`(?:/dev/nvidia|/proc/driver/)[\w/.:-]*|(?:^|[^\pL\pN_./-])/(?:dev|proc|sys|usr|run|tmp|var|etc|lib|bin|opt|home)\b|` +
		`(?i:\bNVIDIA(?:[ _-](?:GeForce|RTX|GTX|Tesla|Quadro|TITAN))*[ _-][a-z]{0,3}\d\w*)`)
)

// Text replaces all secrets in a text.
func (r *Redactor) Text(text string) string {
	text = uuids.ReplaceAllStringFunc(text, func(found string) string {
		parts := uuids.FindStringSubmatch(found)
		return parts[1] + strings.ToUpper(parts[2]) + r.placeholder("UUID", separators.Replace(parts[3])) + parts[4]
	})
	text = processID.ReplaceAllStringFunc(text, func(found string) string {
		parts := processID.FindStringSubmatch(found)
		return parts[1] + strconv.Itoa(r.pid(parts[2]))
	})
	text = processName.ReplaceAllStringFunc(text, func(found string) string {
		parts := processName.FindStringSubmatch(found)
		return parts[1] + r.process(parts[2])
	})
	text = accounts.ReplaceAllStringFunc(text, func(found string) string {
		parts := accounts.FindStringSubmatch(found)
		return r.inPlace("USER", parts[1]) + "@" + r.inPlace("HOST", parts[2])
	})
	text = homes.ReplaceAllStringFunc(text, func(found string) string {
		user := homes.FindStringSubmatch(found)[1]
		return strings.TrimSuffix(found, user) + r.inPlace("USER", user)
	})
	text = outside(kept, text, r.names)
	text = macs.ReplaceAllStringFunc(text, func(found string) string { return r.placeholder("MAC", strings.ReplaceAll(found, "-", ":")) })
	text = hexadecimal.ReplaceAllStringFunc(text, r.hexadecimal)
	text = ipv4.ReplaceAllStringFunc(text, r.address)
	return ipv6.ReplaceAllStringFunc(text, r.address)
}

var separators = strings.NewReplacer("-", "", "_", "")

// inPlace returns what stands for a name that its form has shown.
func (r *Redactor) inPlace(kind, name string) string {
	bare := strings.Trim(name, ".-")
	if slices.Contains(common, strings.ToLower(bare)) {
		return name
	}
	return strings.Replace(name, bare, r.placeholder(kind, bare), 1)
}

// names replaces those that are known.
func (r *Redactor) names(text string) string {
	for _, secret := range r.long {
		text = replaceAnyCase(text, secret, r.words[secret])
	}
	return tokens.ReplaceAllStringFunc(text, r.token)
}

// outside replaces what is not of a form.
func outside(form *regexp.Regexp, text string, replace func(string) string) string {
	var b strings.Builder
	at := 0
	for _, found := range form.FindAllStringIndex(text, -1) {
		b.WriteString(replace(text[at:found[0]]))
		b.WriteString(text[found[0]:found[1]])
		at = found[1]
	}
	b.WriteString(replace(text[at:]))
	return b.String()
}

// hexadecimal replaces a word that is a long hexadecimal number, such as that of a container.
// One with decimal digits only may be an amount.
func (r *Redactor) hexadecimal(found string) string {
	const least, leastDecimal = 12, 32
	digits := strings.Trim(strings.ToLower(found), "0123456789abcdef") == ""
	decimal := strings.Trim(found, "0123456789") == ""
	if !digits || len(found) < least || decimal && len(found) < leastDecimal {
		return found
	}
	return r.placeholder("HEX", found)
}

// token replaces a word that stands by itself.
func (r *Redactor) token(found string) string {
	bare := strings.Trim(found, ".-")
	if placeholder, ok := r.words[strings.ToLower(bare)]; ok {
		return strings.Replace(found, bare, placeholder, 1)
	}
	parts := strings.Split(found, ".")
	for i, part := range parts {
		if placeholder, ok := r.words[strings.ToLower(part)]; ok {
			parts[i] = placeholder
		}
	}
	return strings.Join(parts, ".")
}

// address replaces an IP address, and leaves alone what only has dots and colons as versions
// and PCI addresses do.
func (r *Redactor) address(found string) string {
	bare := strings.Trim(found, ".")
	ip, err := netip.ParseAddr(bare)
	if err != nil || ip.IsLoopback() || ip.IsUnspecified() {
		return found
	}
	return strings.Replace(found, bare, r.placeholder("IP", bare), 1)
}

// firstPID is what placeholders of process IDs begin at, more than any kernel's.
const firstPID = 5_000_000

// pid returns the number that stands for a process ID of others.
func (r *Redactor) pid(text string) int {
	number, err := strconv.Atoi(strings.TrimPrefix(r.placeholder("PID", "pid "+text), "PID-"))
	if err != nil {
		return firstPID
	}
	return firstPID + number
}

func replaceAnyCase(text, lower, by string) string {
	var b strings.Builder
	for {
		at := strings.Index(strings.ToLower(text), lower)
		if at < 0 || len(strings.ToLower(text)) != len(text) {
			b.WriteString(text)
			return b.String()
		}
		b.WriteString(text[:at])
		b.WriteString(by)
		text = text[at+len(lower):]
	}
}
