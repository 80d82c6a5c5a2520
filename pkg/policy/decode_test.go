// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

const head = "apiVersion: policy.partage.dev/v1alpha1\nkind: SharingPolicy\n"

// examples are the documents of a file of testdata, or of all files of a folder, by path, from the second on with a number.
func examples(t testing.TB, name string) map[string][]byte {
	t.Helper()
	var paths []string
	for _, pattern := range []string{name + ".yaml", name + "/*.yaml"} {
		found := must.Get(filepath.Glob(filepath.Join("testdata", pattern)))(t)
		paths = append(paths, found...)
	}
	documents := map[string][]byte{}
	for n, path := range paths {
		content := must.Get(os.ReadFile(path))(t)
		for i, document := range strings.Split(string(content), "\n---\n") {
			if i > 0 {
				path = fmt.Sprintf("%s, document %d", paths[n], i+1)
			}
			documents[path] = []byte(document)
		}
	}
	if len(documents) == 0 {
		t.Fatalf("no examples in testdata/%s", name)
	}
	return documents
}

func mustDecode(t testing.TB, data []byte) *Policy {
	t.Helper()
	return must.Get(Decode(data))(t)
}

// healthWith has the built-in reactions with some others.
func healthWith(quiet time.Duration, xids map[uint64]Effect, conditions map[string]Effect) Health {
	h := builtinHealth()
	h.QuietPeriod, h.XIDs = quiet, xids
	maps.Copy(h.Conditions, conditions)
	return h
}

func TestDecode(t *testing.T) {
	shared := func(change func(o *Offer)) Offer {
		offer := Builtin().Default
		change(&offer)
		return offer
	}
	for name, want := range map[string]*Policy{
		"empty": Builtin(),
		"everything": {
			Rules: []Rule{
				{
					Name:  "one-special-gpu",
					Match: Match{UUID: "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"},
					Offer: Offer{Whole: true},
				},
				{
					Name: "a100-as-28",
					Match: Match{
						ProductName: "NVIDIA A100*", Architecture: "Ampere", PCIDeviceID: "10de:20b2",
						UUID: "GPU-0a1b2c3d-0000-4000-8000-00000000000f",
					},
					Offer: Offer{
						Whole: true,
						Partition: &PartitionOffer{
							Profiles: []string{"1g.10gb", "3g.40gb"},
							Shares: []PartitionShares{
								{
									Profiles:  []string{"1g.10gb"},
									TimeSlice: &TimeSliceOffer{Clients: 4, Interval: IntervalDefault, MemoryOvercommit: 1.5},
								},
								{
									Profiles: []string{"2g.20gb", "1g.10gb+me"},
									MPS: &MPSOffer{
										Clients: 2, MemoryOvercommit: 1, ComputeOvercommit: 1.25, ReservedMemoryBytes: 256 << 20, OnClientKilled: KilledRestart, ClientPriority: PriorityBelowNormal,
										ServerMemoryBytes: new(int64(60 << 20)), ContextMemoryBytes: new(int64(326 << 20)),
									},
									TimeSlice: &TimeSliceOffer{Clients: DefaultClients, Interval: IntervalDefault, MemoryOvercommit: 1},
								},
							},
						},
						MPS:       &MPSOffer{Clients: 8, MemoryOvercommit: 1.5, ComputeOvercommit: 2, ReservedMemoryBytes: 1 << 30},
						TimeSlice: &TimeSliceOffer{Clients: 1, Interval: IntervalShort, MemoryOvercommit: 1},
					},
				},
			},
			Default: Offer{Whole: true, MPS: &MPSOffer{
				Clients: 1024, MemoryOvercommit: 1, ComputeOvercommit: 1, OnClientKilled: KilledReport, ClientPriority: PriorityNormal, ServerMemoryBytes: new(int64), ContextMemoryBytes: new(int64(512 << 20)),
			}},
			Health: healthWith(90*time.Minute, map[uint64]Effect{109: EffectNoExecute, 31: EffectNone, 94: EffectIgnore}, map[string]Effect{
				"gpu-lost": EffectNoExecute, "throttled": EffectNoSchedule, "uncorrected-ecc": EffectNone,
			}),
		},
		"json": {Default: Offer{TimeSlice: &TimeSliceOffer{Clients: 16, Interval: IntervalLong, MemoryOvercommit: 1}}},
		"leave-alone": {
			Rules:   []Rule{{Name: "of-somebody-else", Match: Match{UUID: "GPU-5c89852c-d268-c3f3-1b07-005d5ae1dc3f"}}},
			Default: Builtin().Default,
		},
		"shares-of-partitions-only": {
			Rules: []Rule{{
				Name:  "a100-as-28",
				Match: Match{ProductName: "NVIDIA A100*"},
				Offer: Offer{Partition: &PartitionOffer{
					Profiles: []string{},
					Shares:   []PartitionShares{{Profiles: []string{"1g.10gb"}, TimeSlice: Builtin().Default.TimeSlice}},
				}},
			}},
			Default: Builtin().Default,
		},
		"all-variants": {Default: shared(func(o *Offer) { o.Partition.Variants = true })},
		"variants": {Default: shared(func(o *Offer) {
			o.Partition.Profiles = []string{"1g.24gb+gfx", "1g.24gb+me.all", "2g.48gb-me", "7g.186gb"}
			o.MPS.ReservedMemoryBytes = 1 << 30
		})},
	} {
		t.Run(name, func(t *testing.T) {
			content := must.Get(os.ReadFile(filepath.Join("testdata/valid", name+".yaml")))(t)
			if want.Health.Conditions == nil {
				want.Health = builtinHealth()
			}
			expect.Same(t, mustDecode(t, content), want, "policy")
		})
	}
}

// TestDecodeOffers covers what is not in the examples of whole files.
func TestDecodeOffers(t *testing.T) {
	for text, want := range map[string]string{
		"{}":                                     Builtin().Default.String(),
		"{kinds: [timeslice, gpu]}":              "gpu; timeslice 4 clients",
		"{kinds: [mig]}":                         "mig all profiles but variants",
		"{kinds: [mig], mig: {variants: true}}":  "mig all profiles",
		"{kinds: [mig], mig: {variants: false}}": "mig all profiles but variants",
		"{mig: {}}":                              Builtin().Default.String(),
		"{mps: {}}":                              Builtin().Default.String(),
		"{mps: {clients: 1e1}}":                  "gpu; mig all profiles but variants; mps 10 clients; timeslice 4 clients",
		"{kinds: []}":                            "nothing",
		"{kinds: [mps], mps: {reservedMemory: 1.5Gi}}":         "mps 4 clients, 1536Mi reserved",
		"{kinds: [mps], mps: {reservedMemory: 1e9}}":           "mps 4 clients, 1000000000 reserved",
		"{kinds: [mps], mps: {reservedMemory: \"0\"}}":         "mps 4 clients",
		"{kinds: [mps], mps: {reservedMemory: 1Ti}}":           "mps 4 clients, 1Ti reserved",
		"{kinds: [mps], mps: {serverMemory: 60Mi}}":            "mps 4 clients, 60Mi for the server",
		"{kinds: [mps], mps: {contextMemory: 0}}":              "mps 4 clients, 0 for the context of each",
		"{kinds: [timeslice], timeslice: {interval: Default}}": "timeslice 4 clients",
	} {
		expect.Same(t, mustDecode(t, []byte(head+"default: "+text)).Default.String(), want, text)
	}
}

// TestDecodeRefusesExamples: the first line of each says what the error has to be.
func TestDecodeRefusesExamples(t *testing.T) {
	for _, folder := range []string{"invalid", "invalid-meaning"} {
		for path, content := range examples(t, folder) {
			first, _, _ := strings.Cut(string(content), "\n")
			want, found := strings.CutPrefix(first, "# want: ")
			if !found {
				t.Errorf("%s: the first line must be a comment, want: …", path)
				continue
			}
			p, err := Decode(content)
			if err == nil || p != nil || !strings.HasPrefix(err.Error(), "invalid SharingPolicy: "+want) {
				t.Errorf("%s:\ngot  %v, %v\nwant %s", path, p, err, want)
			}
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	for name, test := range map[string]struct{ in, want string }{
		"nothing":                      {"", "is empty"},
		"a comment":                    {"# nothing\n", "is empty"},
		"null":                         {"null", "policy: Invalid value: must be an object, is empty"},
		"not YAML":                     {head + "rules: [", "line 3: did not find expected node content"},
		"tabs":                         {head + "default:\n\tmps: {}\n", "line 4: found character that cannot start any token"},
		"binary":                       {"\xff\xfe\x00", "yaml: "},
		"control":                      {head + "default: \"\x01\"", "control characters are not allowed"},
		"too long":                     {head + strings.Repeat("#", maxBytes), "is longer than 262144 bytes"},
		"two documents":                {head + "---\n" + head, "must be one YAML document, another one begins in line 3"},
		"bad second":                   {head + "---\n[", "did not find expected node content"},
		"no type":                      {"{}", `[apiVersion: Required value: must be "policy.partage.dev/v1alpha1", kind: Required value: must be "SharingPolicy"]`},
		"type twice":                   {head + "kind: SharingPolicy", "kind: Invalid value: is given more than once, again in line 3"},
		"empty type":                   {"apiVersion:\nkind: 7", "[apiVersion: Invalid value: must be a string, is empty; leave the field out, kind: Invalid value: 7: must be a string, is a whole number]"},
		"field twice":                  {head + "default:\n  mps: {}\n  mps: {clients: 2}", "default.mps: Invalid value: is given more than once, again in line 5"},
		"empty section":                {head + "default: {mps: }", "default.mps: Invalid value: must be an object, is empty; leave the field out"},
		"not a number":                 {head + "default: {mps: {memoryOvercommit: .nan}}", `default.mps.memoryOvercommit: Invalid value: NaN: must be between 1 and 100`},
		"infinite":                     {head + "default: {mps: {clients: .inf}}", `default.mps.clients: Invalid value: +Inf: must be between 1 and 1024`},
		"vast number":                  {head + "default: {mps: {clients: 99999999999999999999}}", "default.mps.clients: Invalid value: 1e+20: must be between 1 and 1024"},
		"false number":                 {head + "default: {mps: {clients: !!int four}}", `default.mps.clients: Invalid value: "four": must be a whole number`},
		"a date":                       {head + "rules: [{name: 2026-01-01, match: {architecture: Ampere}, offer: {}}]", `rules[0].name: Invalid value: "2026-01-01": must be a string, is a date without quotes`},
		"a tag":                        {head + "rules: [{name: !mine a, match: {architecture: Ampere}, offer: {}}]", `rules[0].name: Invalid value: "a": must be a string, is of type "!mine"`},
		"number as key":                {head + "default: {7: {}}", "default.7: Invalid value: unknown field"},
		"list as key":                  {head + "default: {[a]: {}}", `default."": Invalid value: unknown field`},
		"odd key":                      {head + "default: {\"a\\nb.c\": {}}", `default."a\nb.c": Invalid value: unknown field`},
		"long key":                     {head + "? " + strings.Repeat("k", 5000) + "\n: 1\n", strings.Repeat("k", 195) + `"…: Invalid value: unknown field`},
		"long text":                    {head + "default: {kinds: [" + strings.Repeat("ä", 5000) + "]}", strings.Repeat("ä", 40) + `…": supported values`},
		"an alias":                     {head + "rules: &r []\ndefault: *r", "default: Invalid value: must be an object, is an alias (*), which is not allowed"},
		"alias as text":                {head + "rules:\n- {name: &n a, match: {architecture: Ampere}, offer: {}}\n- {name: *n, match: {architecture: Hopper}, offer: {}}", "rules[1].name: Invalid value: must be a string, is an alias (*)"},
		"a merge":                      {head + "default: {<<: {mps: {}}}", `default."<<": Invalid value: unknown field`},
		"unknown anchor":               {head + "default: *d", "unknown anchor 'd' referenced"},
		"many rules":                   {head + "rules: [" + strings.Repeat("a,", 257) + "]", "rules: Too many: 257: must have at most 256 items"},
		"many profiles":                {head + "default: {mig: {profiles: [" + strings.Repeat("1g.5gb,", 65) + "]}}", "default.mig.profiles: Too many: 65: must have at most 64 items"},
		"long glob":                    {head + "rules: [{name: a, match: {productName: \"" + strings.Repeat("*", 257) + "\"}, offer: {}}]", "must be a pattern of 1 to 256 bytes"},
		"nothing in rule":              {head + "rules: [{}]", "[rules[0].name: Required value: says in logs which rule counts, rules[0].match: Required value"},
		"faults beyond what one reads": {head + "default: {" + strings.Repeat("x: 1, ", 50) + "}", "and 18 more faults"},
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Decode([]byte(test.in))
			if err == nil || p != nil || !strings.HasPrefix(err.Error(), "invalid SharingPolicy: ") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got  %v, %v\nwant %s", p, err, test.want)
			}
			if err != nil && len(err.Error()) > 8000 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
		})
	}
}

func TestAllFaultsAtOnce(t *testing.T) {
	_, err := Decode([]byte(head + `
rules:
- name: "!"
  match: {architecture: Amper, pciDeviceID: 20b2}
  offer:
    mps: {clients: 0, memoryOvercommit: lots}
    mig:
      shares:
      - profiles: [huge]
        mps: {clients: 0}
- match: {uuid: GPU-1}
  offer: {kinds: [gpu], timeslice: {interval: Brief}}
default: {kind: [gpu]}
`))
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{
		"rules[0].name: ", "rules[0].match.architecture: ", "rules[0].match.pciDeviceID: ", "rules[0].offer.mps.clients: ",
		"rules[0].offer.mps.memoryOvercommit: ", "rules[0].offer.mig.shares[0].profiles[0]: ", "rules[0].offer.mig.shares[0].mps.clients: ",
		"rules[1].match.uuid: ", "rules[1].offer.timeslice.interval: ", "rules[1].offer.timeslice: Forbidden", "rules[1].name: Required", "default.kind: ",
	} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}

// TestDecodeIsBounded: what would become large, deep or slow is refused like
// anything else. The test runner's time limit is the measure.
func TestDecodeIsBounded(t *testing.T) {
	laughs := "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
	for i := 1; i < 40; i++ {
		laughs += fmt.Sprintf("a%d: &a%d [%s]\n", i, i, strings.TrimSuffix(strings.Repeat(fmt.Sprintf("*a%d, ", i-1), 9), ", "))
	}
	fill := func(text string) string { return strings.Repeat(text, (maxBytes-len(head)-20)/len(text)) }
	for name, text := range map[string]string{
		"laughs":   laughs,
		"brackets": "default: " + fill("["),
		"braces":   "default: " + fill("{a: "),
		"keys":     fill("? "),
		"dashes":   fill("- "),
		"comments": fill("#\n"),
		"indents": "default:\n" + func() (s string) {
			for i := range 600 {
				s += strings.Repeat(" ", i) + "a:\n"
			}
			return s
		}(),
		"empty lines": fill("\n"),
		"fields":      fill("a: 1\n"),
		"items":       "rules: [" + fill("1,") + "]",
		"anchors":     "rules: [" + fill("&a a,") + "]",
		"quotes":      "rules: \"" + fill("\\n") + "\"",
		"digits":      "default: {mps: {clients: " + fill("9") + "}}",
		"memory":      "default: {mps: {reservedMemory: " + fill("9") + "}}",
		"stars":       "rules: [{name: a, offer: {}, match: {productName: '" + fill("*a") + "'}}]",
	} {
		t.Run(name, func(t *testing.T) {
			p, err := Decode([]byte(head + text))
			if name == "comments" || name == "empty lines" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if err == nil {
				t.Errorf("accepted as %v", p)
			} else if len(err.Error()) > 8000 {
				t.Errorf("the message has %d bytes", len(err.Error()))
			}
		})
	}
}

func FuzzDecode(f *testing.F) {
	for _, folder := range []string{"valid", "invalid", "invalid-meaning"} {
		for _, content := range examples(f, folder) {
			f.Add(content)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Decode(data)
		if err != nil {
			if p != nil || !strings.HasPrefix(err.Error(), "invalid SharingPolicy: ") {
				t.Errorf("policy %v with error %q", p, err)
			}
			return
		}
		checkValid(t, p)
		for _, g := range []*gpu.GPU{{}, a100()} {
			effective := p.For(g)
			if effective.String() == "" || strings.Contains(effective.String(), "\n") {
				t.Errorf("%q", effective)
			}
			expect.Same(t, p.For(g), effective, "offer")
		}
	})
}

// checkValid checks what the readers of a policy rely on.
func checkValid(t *testing.T, p *Policy) {
	t.Helper()
	names := map[string]bool{}
	for _, rule := range p.Rules {
		if !ruleName.MatchString(rule.Name) || names[rule.Name] {
			t.Errorf("rule %q", rule.Name)
		}
		names[rule.Name] = true
		if (rule.Match == Match{}) {
			t.Errorf("rule %q matches everything", rule.Name)
		}
		checkOffer(t, rule.Offer)
	}
	checkOffer(t, p.Default)
}

func checkOffer(t *testing.T, o Offer) {
	t.Helper()
	checkShares(t, o.MPS, o.TimeSlice)
	if o.Partition == nil {
		return
	}
	if o.Partition.Profiles != nil && len(o.Partition.Profiles)+len(o.Partition.Shares) == 0 {
		t.Error("partitions are offered, and none is")
	}
	shared := map[string]bool{}
	for _, s := range o.Partition.Shares {
		if len(s.Profiles) == 0 || s.MPS == nil && s.TimeSlice == nil || s.TimeSlice != nil && s.TimeSlice.Interval != IntervalDefault {
			t.Errorf("shares of partitions %+v", s)
		}
		for _, name := range s.Profiles {
			if shared[name] || !profileName.MatchString(name) {
				t.Errorf("profile %q", name)
			}
			shared[name] = true
		}
		checkShares(t, s.MPS, s.TimeSlice)
	}
}

func saneMemory(amounts ...*int64) bool {
	return !slices.ContainsFunc(amounts, func(bytes *int64) bool { return bytes != nil && (*bytes < 0 || *bytes > maxReserved) })
}

func checkShares(t *testing.T, mps *MPSOffer, slice *TimeSliceOffer) {
	t.Helper()
	sane := func(clients int, factors ...float64) bool {
		return clients >= 1 && clients <= maxClients &&
			!slices.ContainsFunc(factors, func(f float64) bool { return !(f >= 1 && f <= maxOvercommit) })
	}
	if mps != nil && (!sane(mps.Clients, mps.MemoryOvercommit, mps.ComputeOvercommit) || !saneMemory(&mps.ReservedMemoryBytes, mps.ServerMemoryBytes, mps.ContextMemoryBytes)) {
		t.Errorf("%+v", mps)
	}
	if slice != nil && (!sane(slice.Clients, slice.MemoryOvercommit) || !slices.Contains(intervals, slice.Interval)) {
		t.Errorf("%+v", slice)
	}
}

// TestOffers: variants have to be asked for, all at once or by name.
func TestOffers(t *testing.T) {
	for name, tc := range map[string]struct {
		offer                *PartitionOffer
		plain, extra, nomore bool
	}{
		"no partitions": {nil, false, false, false},
		"by default":    {Builtin().Default.Partition, true, false, false},
		"variants":      {&PartitionOffer{Variants: true}, true, true, true},
		"by name":       {&PartitionOffer{Profiles: []string{"1g.24gb+gfx"}}, false, true, false},
		"shares only":   {&PartitionOffer{Profiles: []string{}}, false, false, false},
	} {
		got := []bool{tc.offer.Offers("1g.24gb"), tc.offer.Offers("1g.24gb+gfx"), tc.offer.Offers("1g.24gb-me")}
		if want := []bool{tc.plain, tc.extra, tc.nomore}; !slices.Equal(got, want) {
			t.Errorf("%s: offers 1g.24gb, +gfx, -me: %v, want %v", name, got, want)
		}
	}
}
