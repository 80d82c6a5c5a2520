// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/docs/page"
	"github.com/partage-dev/partage/test/gpusim/catalog"
)

func allChecks() []Check {
	var all []Check
	for _, part := range Parts {
		all = append(all, Checks(part)...)
	}
	return all
}

// TestChecks: each has a name of its own, and refers to code that is there.
func TestChecks(t *testing.T) {
	valid := regexp.MustCompile(`^[a-z]+\.[a-z][-a-z]*$`)
	seen := map[string]bool{}
	for _, c := range allChecks() {
		if !valid.MatchString(c.ID) || seen[c.ID] {
			t.Errorf("check %q: want a name of its own, family.name", c.ID)
		}
		seen[c.ID] = true
		if c.Assumption == "" || c.find == nil {
			t.Errorf("check %s is not complete", c.ID)
		}
		if _, err := os.Stat(filepath.Join("../..", c.Code)); err != nil {
			t.Errorf("check %s: %v", c.ID, err)
		}
	}
}

// TestDocs: the documentation lists all checks, and no others.
func TestDocs(t *testing.T) {
	table := page.NewTable("check", "part", "what the driver assumes", "code")
	for _, part := range Parts {
		for _, c := range Checks(part) {
			table.Row(page.Code(c.ID), string(part), c.Assumption, fmt.Sprintf("[%s](../../%s)", c.Code, c.Code))
		}
	}
	page.Generated(t, *update, "docs/how-to/conformance.md", table.String())

	facts, err := os.ReadFile("../../docs/design/real-nodes.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, c := range allChecks() {
		known[c.ID] = true
	}
	for _, found := range regexp.MustCompile("check `([^`]+)`").FindAllStringSubmatch(string(facts), -1) {
		if !known[found[1]] {
			t.Errorf("docs/design/real-nodes.md names the check %s, which does not exist", found[1])
		}
	}
}

// TestExitCode: a difference counts more than what could not be found out.
func TestExitCode(t *testing.T) {
	holds, differs := expect(true, ""), expect(false, "")
	silent := failed(ErrNoAnswer)
	for name, test := range map[string]struct {
		findings []Finding
		want     int
	}{
		"nothing":               {nil, 2},
		"all hold":              {[]Finding{holds, holds}, 0},
		"one differs":           {[]Finding{holds, differs, silent}, 1},
		"some are not testable": {[]Finding{holds, cannot("why")}, 0},
		"none is testable":      {[]Finding{cannot("why")}, 2},
		"no answer":             {[]Finding{holds, silent}, 2},
	} {
		r := &Report{}
		for _, f := range test.findings {
			r.add(&Check{}, f)
		}
		if got := r.ExitCode(); got != test.want {
			t.Errorf("%s: got %d, want %d", name, got, test.want)
		}
	}
}

func question(t *testing.T, n *Node, live func(context.Context) (string, error)) (string, error) {
	t.Helper()
	return decode[string](put(t.Context(), n, File, "question", func(ctx context.Context, _ *machine) (string, error) { return live(ctx) }))
}

// TestNoAnswer: what hangs is left behind, and the next question is asked all the same.
func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := NewNode(Options{Limit: time.Second})
		release := make(chan struct{})
		defer close(release)
		_, err := question(t, n, func(context.Context) (string, error) {
			<-release
			return "late", nil
		})
		if !errors.Is(err, ErrNoAnswer) || err.Error() != "no answer in 1s" {
			t.Errorf("got %v", err)
		}
		if f := failed(err); f.Verdict != NotTestable || f.Reason != "no answer in 1s" {
			t.Errorf("got %+v", f)
		}
		if answer, err := question(t, n, func(context.Context) (string, error) { return "yes", nil }); answer != "yes" || err != nil {
			t.Errorf("the next question was answered with %q, %v", answer, err)
		}
	})
}

// TestTimeIsOver: nothing is asked after that.
func TestTimeIsOver(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	q := &inquiry{ctx: ctx, Node: NewNode(Options{})}
	do(q, File, "question", func(context.Context, *machine) (string, error) {
		t.Error("it was asked")
		return "", nil
	})
	if !errors.Is(q.err, ErrNoAnswer) {
		t.Errorf("got %v", q.err)
	}
}

// TestTranscript: an answer that is replayed is the one that was recorded, errors included.
func TestTranscript(t *testing.T) {
	var recorded bytes.Buffer
	n := NewNode(Options{NodeName: "n", Transcript: &recorded})
	questions := func(n *Node) (out []string) {
		for _, live := range []func() (string, error){
			func() (string, error) { return "first", nil },
			func() (string, error) { return "second", nil },
			func() (string, error) { return "", fmt.Errorf("open: %w", fs.ErrNotExist) },
			func() (string, error) { return "", &gpu.PendingError{Call: "nvmlInit", Since: time.Unix(0, 0)} },
		} {
			answer, err := question(t, n, func(context.Context) (string, error) { return live() })
			out = append(out, fmt.Sprint(answer, " ", err, " ", errors.Is(err, fs.ErrNotExist), " ", errors.Is(err, ErrNoAnswer)))
		}
		return out
	}
	want := questions(n)
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	recorded.WriteString(`{"kind":"file","quest`) // the process was killed
	replayed, err := Replay(&recorded)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, questions(replayed)); diff != "" {
		t.Errorf("(-recorded +replayed):\n%s", diff)
	}
	if _, err := question(t, replayed, nil); !errors.Is(err, ErrNoAnswer) || !strings.Contains(err.Error(), "the transcript does not have file: question") {
		t.Errorf("a question that was not asked: got %v", err)
	}
}

func TestBadTranscript(t *testing.T) {
	for name, test := range map[string]struct{ text, want string }{
		"empty":         {"", "first line of the transcript: EOF"},
		"no transcript": {"kind: file", "first line"},
		"newer":         {`{"transcript":2}`, "has version 2: want 1"},
		"wrong line":    {`{"transcript":1}` + "\n" + `{"kind":1}`, "line 2"},
	} {
		if _, err := Replay(strings.NewReader(test.text)); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got %v, want %q", name, err, test.want)
		}
	}
}

// full is a file without room.
type full struct{}

func (full) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestTranscriptIsNotWritten(t *testing.T) {
	if err := NewNode(Options{Transcript: full{}}).Close(); err == nil || !strings.Contains(err.Error(), "no space left") {
		t.Errorf("got %v", err)
	}
}

// TestGolden: the transcripts in testdata give these reports. TestRecord of
// test/flow/conformance makes those of simulated machines.
func TestGolden(t *testing.T) {
	transcripts, err := filepath.Glob("testdata/*.jsonl")
	if err != nil || len(transcripts) == 0 {
		t.Fatalf("no transcripts: %v", err)
	}
	for _, path := range transcripts {
		base := strings.TrimSuffix(path, ".jsonl")
		t.Run(filepath.Base(base), func(t *testing.T) {
			in, err := os.Open(path)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = in.Close() }()
			n, err := Replay(in)
			if err != nil {
				t.Fatal(err)
			}
			report := Run(t.Context(), n)
			golden(t, base+".table.golden.txt", report.WriteTable)
			golden(t, base+".golden.json", report.WriteJSON)
			golden(t, base+".patch.golden.yaml", func(out io.Writer) error { return n.WriteCataloguePatch(t.Context(), out) })
		})
	}
}

func golden(t *testing.T, path string, write func(io.Writer) error) {
	t.Helper()
	var got bytes.Buffer
	if err := write(&got); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o600); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

// TestPatch: a patch has the form of the catalogue, and what was measured of a simulated
// board is what the catalogue has.
func TestPatch(t *testing.T) {
	patches, err := filepath.Glob("testdata/*.patch.golden.yaml")
	if err != nil || len(patches) == 0 {
		t.Fatalf("no patches: %v", err)
	}
	for _, path := range patches {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for document := range strings.SplitSeq(string(text), "---\n") {
			if strings.TrimSpace(strings.TrimPrefix(document, "#")) == "" || strings.HasPrefix(document, "# Measured") {
				continue
			}
			if strings.HasPrefix(document, "# For latencies.yaml.") {
				if profiles, err := catalog.DecodeLatencies([]byte(document)); err != nil || len(profiles) != 1 {
					t.Errorf("%s: got %v, %v", path, profiles, err)
				}
				continue
			}
			var board catalog.Board
			if err := yaml.UnmarshalStrict([]byte(document), &board); err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			known, err := catalog.Load(board.Name)
			if err != nil {
				t.Errorf("%s: %v", path, err)
				continue
			}
			if board.Product.Source != catalog.Measured || board.Product.PCIDevice != known.Product.PCIDevice || board.Product.SMs != known.Product.SMs {
				t.Errorf("%s: got %+v of %s", path, board.Product, board.Name)
			}
			if board.MIG != nil && len(board.MIG.Profiles) != len(known.MIG.Profiles) {
				t.Errorf("%s: got %d profiles of %s", path, len(board.MIG.Profiles), board.Name)
			}
		}
	}
}

// TestUnlisted: a GPU on the PCI bus that NVML does not list is a difference, and so is one that is listed and broken.
func TestUnlisted(t *testing.T) {
	n, err := Replay(strings.NewReader(`{"transcript":1,"parts":["read-only"]}
{"kind":"file","question":"GPUs on the PCI bus","answer":["0000:11:00.0","0000:16:00.0","0000:1b:00.0"]}
{"kind":"nvml","question":"all GPUs","answer":{"gpus":[{"pciAddress":"0000:11:00.0"}],"broken":[{"pciAddress":"0000:1b:00.0","reason":"lost"}]}}
`))
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, r := range Run(t.Context(), n).Results {
		if r.Check == "driver.gpus" {
			got[r.Subject] = r.Observed
		}
	}
	if diff := cmp.Diff(map[string]string{"0000:16:00.0": "NVML does not list it", "0000:1b:00.0": "lost"}, got); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestReportIsReadable: what programs read back is what was written.
func TestReportIsReadable(t *testing.T) {
	r := &Report{Header: Header{Node: "n", Parts: []Part{ReadOnly}}}
	r.add(&Check{ID: "a.b"}, expect(false, "that").because("it follows").withSubject("gpu"))
	var out bytes.Buffer
	if err := r.WriteJSON(&out); err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(out.Bytes(), &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(r.Results[0].Reason, back.Results[0].Reason); diff != "" || back.Summary.Differs != 1 {
		t.Errorf("got %+v", back)
	}
}
