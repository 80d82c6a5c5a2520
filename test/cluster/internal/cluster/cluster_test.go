// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/test/cluster/internal/layout"
)

func TestParseStat(t *testing.T) {
	const tail = "1 7 7 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4242 1 2 3"
	tests := map[string]struct {
		text string
		want procStat
		bad  bool
	}{
		"plain":              {text: "7 (sh) S " + tail, want: procStat{"S", 4242}},
		"brackets and space": {text: "7 (a) S 1 (b c) Z " + tail, want: procStat{"Z", 4242}},
		"short":              {text: "7 (sh) S 1", bad: true},
		"none":               {bad: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, err := parseStat(tc.text)
			if (err != nil) != tc.bad || got != tc.want {
				t.Errorf("got %+v, %v; want %+v", got, err, tc.want)
			}
		})
	}
}

func TestAlive(t *testing.T) {
	p, err := identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if !p.Alive() {
		t.Error("this process is not alive")
	}
	later := p
	later.Ticks++
	rebooted := p
	rebooted.Boot = "another"
	for name, other := range map[string]Process{"another process of the same id": later, "before a reboot": rebooted} {
		if other.Alive() {
			t.Errorf("%s is alive", name)
		}
		if (&State{First: []Process{p, other}}).Alive() {
			t.Errorf("a cluster with %s is alive", name)
		}
	}
}

func TestStateRoundTrip(t *testing.T) {
	c, err := layout.Repo{Root: t.TempDir()}.Cluster("a")
	if err != nil {
		t.Fatal(err)
	}
	if s, err := Load(c); s != nil || err != nil {
		t.Errorf("no record gives %v, %v", s, err)
	}
	if err := os.MkdirAll(c.Run(), 0o755); err != nil {
		t.Fatal(err)
	}
	want := &State{
		Phase: Up, Options: Options{Nodes: []Node{{"n1", "dgx-h100"}, {Name: "n2"}}},
		First: []Process{{PID: 7, Ticks: 9, Boot: "b"}, {PID: 8, Ticks: 9, Boot: "b"}},
	}
	if err := want.save(c); err != nil {
		t.Fatal(err)
	}
	got, err := Load(c)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
	for node, pid := range map[string]int{"": 7, "n1": 7, "n2": 8, "n3": 0} {
		if name, p, err := got.first(node); p.PID != pid || (err != nil) != (pid == 0) || node != "" && err == nil && name != node {
			t.Errorf("first process of node %q: %s, %+v, %v; want %d", node, name, p, err, pid)
		}
	}
}

func TestLock(t *testing.T) {
	c, err := layout.Repo{Root: t.TempDir()}.Cluster("a")
	if err != nil {
		t.Fatal(err)
	}
	unlock, err := lock(c)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock(c); err == nil {
		t.Error("locked twice")
	}
	unlock()
	again, err := lock(c)
	if err != nil {
		t.Fatal(err)
	}
	again()
}
