// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/pkg/kubectl/fleet"
	"github.com/partage-dev/partage/pkg/kubectl/scrape"
	"github.com/partage-dev/partage/pkg/kubectl/ui/view"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/kubectl/fleets"
	"github.com/partage-dev/partage/test/must"
)

func demo(t *testing.T) *fake.Clientset {
	t.Helper()
	objects := must.Get(fleets.Demo())(t)
	return fake.NewClientset(objects...)
}

// serve starts a server, which ends with the test.
func serve(t *testing.T, client *fake.Clientset, explain Explain, measure ...Measure) (*Server, *httptest.Server) {
	t.Helper()
	config := Config{Driver: fleets.Driver, Namespace: "research", Context: "demo", Explain: explain}
	if len(measure) > 0 {
		config.Measure = measure[0]
	}
	s := must.Get(New(client, config))(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.page.run(ctx) }()
	web := httptest.NewServer(s.handler)
	t.Cleanup(func() {
		cancel()
		expect.Do(t, <-ended)
		web.Close()
	})
	return s, web
}

func TestGuard(t *testing.T) {
	s, err := New(fake.NewClientset(), Config{})
	must.Do(t, err)
	page := s.Path()
	tests := []struct {
		name   string
		method string
		path   string
		host   string
		header map[string]string
		want   int
	}{
		{name: "page", want: http.StatusOK},
		{name: "HEAD", method: http.MethodHead, want: http.StatusOK},
		{name: "localhost", host: "localhost:1234", want: http.StatusOK},
		{name: "tunnel with another port", host: "127.0.0.1:9", want: http.StatusOK},
		{name: "model", path: page + "model.json", want: http.StatusOK},
		{name: "own origin", header: map[string]string{"Origin": "http://127.0.0.1:1234"}, want: http.StatusOK},
		{name: "typed address", header: map[string]string{"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, want: http.StatusOK},
		{name: "link from elsewhere", header: map[string]string{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, want: http.StatusOK},

		{name: "no token", path: "/", want: http.StatusForbidden},
		{name: "asset without token", path: "/app.js", want: http.StatusForbidden},
		{name: "model without token", path: "/model.json", want: http.StatusForbidden},
		{name: "wrong token", path: "/" + rand.Text() + "/", want: http.StatusForbidden},
		{name: "part of the token", path: page[:len(page)-3] + "/", want: http.StatusForbidden},
		{name: "token and more", path: strings.TrimSuffix(page, "/") + "A/", want: http.StatusForbidden},
		{name: "token without slash", path: strings.TrimSuffix(page, "/"), want: http.StatusForbidden},
		{name: "token in the query", path: "/?token=" + strings.Trim(page, "/"), want: http.StatusForbidden},

		{name: "rebound name", host: "evil.example.com:1234", want: http.StatusMisdirectedRequest},
		{name: "name that begins like ours", host: "127.0.0.1.evil.example.com", want: http.StatusMisdirectedRequest},
		{name: "another address", host: "192.0.2.1:1234", want: http.StatusMisdirectedRequest},
		{name: "foreign origin", header: map[string]string{"Origin": "http://evil.example.com"}, want: http.StatusForbidden},
		{name: "origin of another port", header: map[string]string{"Origin": "http://127.0.0.1:8080"}, want: http.StatusForbidden},
		{name: "origin of a file", header: map[string]string{"Origin": "null"}, want: http.StatusForbidden},
		{name: "script of another page", path: page + "app.js", header: map[string]string{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "script"}, want: http.StatusForbidden},
		{name: "another port of this machine", path: page + "model.json", header: map[string]string{"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Dest": "empty"}, want: http.StatusForbidden},
		{name: "frame", header: map[string]string{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, want: http.StatusForbidden},

		{name: "POST", method: http.MethodPost, want: http.StatusMethodNotAllowed},
		{name: "PUT", method: http.MethodPut, want: http.StatusMethodNotAllowed},
		{name: "DELETE", method: http.MethodDelete, want: http.StatusMethodNotAllowed},
		{name: "OPTIONS", method: http.MethodOptions, want: http.StatusMethodNotAllowed},
		{name: "no such file", path: page + "none.js", want: http.StatusNotFound},
		{name: "out of the folder", path: page + "../command.go", want: http.StatusForbidden},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			path := test.path
			if path == "" {
				path = page
			}
			method := test.method
			if method == "" {
				method = http.MethodGet
			}
			r := httptest.NewRequest(method, "http://127.0.0.1:1234/", nil)
			var err error
			if r.URL, err = url.Parse(path); err != nil {
				t.Fatal(err)
			}
			if strings.Contains(path, "..") {
				r.URL.Path = "/command.go" // as a browser resolves it
			}
			if test.host != "" {
				r.Host = test.host
			}
			for name, value := range test.header {
				r.Header.Set(name, value)
			}
			w := httptest.NewRecorder()
			s.handler.ServeHTTP(w, r)
			expect.Equal(t, w.Code, test.want, "status", w.Body)
			policy := w.Header().Get("Content-Security-Policy")
			for _, want := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"} {
				expect.Contains(t, policy, want, "Content-Security-Policy")
			}
			if strings.Contains(policy, "unsafe") {
				t.Errorf("Content-Security-Policy %q", policy)
			}
			for name, want := range map[string]string{
				"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store",
				"Cross-Origin-Resource-Policy": "same-origin", "Access-Control-Allow-Origin": "", "Set-Cookie": "",
			} {
				if w.Code == http.StatusNotFound && name == "Cache-Control" {
					continue // the file server takes it back
				}
				expect.Equal(t, w.Header().Get(name), want, "header", name)
			}
		})
	}
	t.Logf("%d cases", len(tests))
}

// TestAssets reads what a browser would load, and what its policy would refuse.
func TestAssets(t *testing.T) {
	s := must.Get(New(fake.NewClientset(), Config{}))(t)
	get := func(name string) *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodGet, "http://127.0.0.1"+s.Path()+name, nil)
		s.handler.ServeHTTP(w, r)
		return w
	}
	refers := regexp.MustCompile(`(?:src|href)="([^"#$]+)"|from "\./([^"]+)"`)
	inline := regexp.MustCompile(`(?i)<script[^>]*>[^<]|<style|\sstyle=|\son[a-z]+=|https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write`)
	seen := map[string]bool{}
	for next := []string{""}; len(next) > 0; {
		name := next[0]
		next = next[1:]
		if seen[name] {
			continue
		}
		seen[name] = true
		w := get(name)
		expect.Equal(t, w.Code, http.StatusOK, name, "status")
		want := "text/html"
		switch {
		case strings.HasSuffix(name, ".js"):
			want = "text/javascript"
		case strings.HasSuffix(name, ".css"):
			want = "text/css"
		case strings.HasSuffix(name, ".svg"):
			want = "image/svg+xml"
		}
		if got := w.Header().Get("Content-Type"); !strings.HasPrefix(got, want) {
			t.Errorf("%q: Content-Type %q, want %q", name, got, want)
		}
		text := w.Body.String()
		expect.Equal(t, inline.FindString(strings.ReplaceAll(text, "http://www.w3.org/2000/svg", "")), "", name)
		for _, match := range refers.FindAllStringSubmatch(text, -1) {
			next = append(next, match[1]+match[2])
		}
	}
	files := must.Get(fs.Glob(embedded, "assets/*"))(t)
	for _, file := range files {
		if name := strings.TrimPrefix(file, "assets/"); !seen[name] && name != "index.html" {
			t.Errorf("nothing loads %s", name)
		}
	}
	if len(seen) < 9 {
		t.Errorf("only %d files", len(seen))
	}
}

// stream reads what a server has, again and again.
type stream struct {
	t      *testing.T
	client *http.Client
	url    string
	tag    string
}

// objects are the parts of the page.
type objects map[string]json.RawMessage

func listen(t *testing.T, s *Server, web *httptest.Server) *stream {
	return &stream{t: t, client: web.Client(), url: web.URL + s.Path() + "model.json"}
}

// next returns the page, or nil if it is the one that was returned last.
func (s *stream) next() objects {
	s.t.Helper()
	r := must.Get(http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url, nil))(s.t)
	r.Header.Set("If-None-Match", s.tag)
	response := must.Get(s.client.Do(r))(s.t)
	defer func() { _ = response.Body.Close() }()
	if response.StatusCode == http.StatusNotModified {
		return nil
	}
	state := objects{}
	if err := json.NewDecoder(response.Body).Decode(&state); err != nil || response.StatusCode != http.StatusOK {
		s.t.Fatalf("status %d: %v", response.StatusCode, err)
	}
	s.tag = response.Header.Get("ETag")
	return state
}

// until follows a server until a condition holds. The test's own limit is the only one.
func (s *stream) until(what string, holds func(objects) bool) objects {
	s.t.Helper()
	for {
		state := s.next()
		if state != nil && holds(state) {
			return state
		}
		if state != nil {
			s.t.Logf("not yet %s: %s", what, state["meta"])
		}
		select {
		case <-s.t.Context().Done():
			s.t.Fatalf("not %s", what)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

func part[T any](t *testing.T, state objects, key string) T {
	t.Helper()
	var value T
	must.Do(t, json.Unmarshal(state[key], &value), key)
	return value
}

func metaOf(t *testing.T, state objects) view.Meta {
	t.Helper()
	if state["meta"] == nil {
		return view.Meta{Loading: true}
	}
	return part[view.Meta](t, state, "meta")
}

// TestChanges has the page follow changes, and sends nothing where nothing has changed.
func TestChanges(t *testing.T) {
	client := demo(t)
	s, web := serve(t, client, nil)
	page := listen(t, s, web)
	loaded := page.until("loaded", func(state objects) bool { return !metaOf(t, state).Loading })
	if got, want := metaOf(t, loaded).Summary, (view.Summary{Nodes: 3, GPUs: 14, Used: 10, Free: 4, Room: 6, Unhealthy: 1, Waiting: 2, Claims: 21}); got != want {
		t.Errorf("summary %+v, want %+v", got, want)
	}
	if again := page.next(); again != nil {
		t.Error("the page is sent again, and has not changed")
	}

	// The claim ends: its place is free, and nothing else changes but the sums.
	must.Do(t, client.ResourceV1().ResourceClaims("research").Delete(t.Context(), "notebook-lin", metav1.DeleteOptions{}))
	changed := page.until("changed", func(objects) bool { return true })
	for key, before := range loaded {
		gone := slices.Contains([]string{"claim/research/notebook-lin", "pod/research/notebook-lin"}, key)
		if after, has := changed[key]; has == gone || has && !slices.Contains([]string{"meta", "node/dgx-1"}, key) && !bytes.Equal(before, after) {
			t.Errorf("%s has changed, is there: %t", key, has)
		}
	}
	expect.Equal(t, part[view.Node](t, changed, "node/dgx-1").GPUs[0].Blocks[3].Kind, view.KindFree, "memory slice 4")
}

// TestMissingRights takes rights away and gives them back.
func TestMissingRights(t *testing.T) {
	client := demo(t)
	var refused atomic.Bool
	refused.Store(true)
	forbid := func(resource string, everywhere bool) {
		answer := func(a kubetesting.Action) error {
			if !refused.Load() || !everywhere && a.GetNamespace() != "" {
				return nil
			}
			return apierrors.NewForbidden(schema.GroupResource{Resource: resource}, "", nil)
		}
		client.PrependReactor("list", resource, func(a kubetesting.Action) (bool, runtime.Object, error) {
			err := answer(a)
			return err != nil, nil, err
		})
	}
	forbid("nodes", true)
	forbid("pods", false)
	s, web := serve(t, client, nil)
	events := listen(t, s, web)
	without := events.until("loaded", func(state objects) bool { return !metaOf(t, state).Loading })

	type right struct{ verb, resource, namespace string }
	var rights []right
	for _, p := range metaOf(t, without).Problems {
		if !p.Forbidden || p.Unknown == "" {
			t.Errorf("problem %+v: want a right that is missing, and what is unknown without it", p)
		}
		rights = append(rights, right{p.Verb, p.Resource, p.Namespace})
	}
	for _, want := range []right{{"list", "nodes", ""}, {"list", "pods", ""}} {
		if !slices.Contains(rights, want) {
			t.Errorf("rights that are missing: %v; %v is not among them", rights, want)
		}
	}
	expect.Equal(t, metaOf(t, without).Summary.GPUs, 14, "GPUs, as slices may be read")
	if without["pod/research/protein-fold"] == nil || without["pod/serving/embed-0"] != nil {
		t.Error("want the pods of namespace research, and of no other")
	}

	refused.Store(false)
	// One namespace is read as long as that works; nothing was read of the nodes.
	events.until("the right to read nodes", func(state objects) bool {
		return !slices.ContainsFunc(metaOf(t, state).Problems, func(p view.Gap) bool { return p.Resource == "nodes" })
	})
}

// TestUsage says what claims use when the driver's pods tell it, and which right is missing when they may not be asked.
func TestUsage(t *testing.T) {
	claim := scrape.Claim{ID: scrape.ID{Namespace: "research", Name: "notebook-lin", Node: "dgx-1", Device: "gpu-0000-1b-00-0-mig-1g10gb-4"}, UsedBytes: new(int64(3 << 30)), Utilization: new(0.5)}
	proxy := apierrors.NewForbidden(schema.GroupResource{Resource: "pods/proxy"}, "plugin", nil)
	for _, test := range []struct {
		name string
		told scrape.Result
		want string
	}{
		{"told", scrape.Result{Claims: map[scrape.ID]*scrape.Claim{claim.ID: &claim}}, `"usage":{"memory":3221225472,"of":`},
		{"forbidden", scrape.Result{Failures: []scrape.Failure{{Node: "dgx-1", Err: proxy}}}, `"verb":"get","resource":"pods/proxy","forbidden":true`},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, web := serve(t, demo(t), nil, func(context.Context) (*scrape.Result, error) { return &test.told, nil })
			state := listen(t, s, web).until(test.name, func(state objects) bool {
				return strings.Contains(string(state["meta"])+string(state["node/dgx-1"]), test.want)
			})
			if got := strings.Contains(string(state["node/dgx-1"]), `"memory":3221225472`); got != (test.name == "told") {
				t.Errorf("what is used is shown: %t", got)
			}
		})
	}
}

// TestExplanations shows what explains a waiting pod, and only these are explained.
func TestExplanations(t *testing.T) {
	var asked atomic.Int64
	s, web := serve(t, demo(t), func(_ context.Context, m *fleet.Model) func(*corev1.Pod) view.Explanation {
		return func(pod *corev1.Pod) view.Explanation {
			asked.Add(1)
			expect.Equal(t, len(m.Nodes), 3, "nodes")
			return view.Explanation{Verdict: "because of " + pod.Name, Text: "at length"}
		}
	})
	key := "pod/training/pretrain-1"
	state := listen(t, s, web).until("explained", func(state objects) bool {
		return strings.Contains(string(state[key]), "explanation")
	})
	if got, want := part[view.Pod](t, state, key).Explanation, (view.Explanation{Verdict: "because of pretrain-1", Text: "at length"}); got == nil || *got != want {
		t.Errorf("explanation %+v, want %+v", got, want)
	}
	if strings.Contains(string(state["pod/serving/embed-0"]), "explanation") {
		t.Error("a running pod was explained")
	}
	if asked.Load() < 2 {
		t.Error("want two explanations")
	}
}

// TestByAllocator has the same words as kubectl gpu explain.
func TestByAllocator(t *testing.T) {
	client := demo(t)
	s, web := serve(t, client, ByAllocator(client))
	key := "pod/research/notebook-kim"
	state := listen(t, s, web).until("explained", func(state objects) bool {
		return strings.Contains(string(state[key]), "explanation")
	})
	e := part[view.Pod](t, state, key).Explanation
	if !strings.Contains(e.Verdict, "1g.12gb") && !strings.Contains(e.Text, "1g.12gb") {
		t.Errorf("the explanation does not name the profile that nothing has: %+v", e)
	}
	expect.Contains(t, e.Text, "notebook-kim", "text")
	t.Log(e.Verdict, "\n", e.Text)
}

// TestStuck explains a pod that has a node and whose containers do not start by its events.
func TestStuck(t *testing.T) {
	client := demo(t)
	pods := client.CoreV1().Pods("serving")
	pod := must.Get(pods.Get(t.Context(), "embed-0", metav1.GetOptions{}))(t)
	pod.Status.Phase = corev1.PodPending
	must.Get(pods.Update(t.Context(), pod, metav1.UpdateOptions{}))(t)
	const message = `MountVolume.SetUp failed for volume "models" : configmap "models" not found`
	event := &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Namespace: "serving", Name: "embed-0.1"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: "serving", Name: "embed-0", UID: pod.UID},
		Type:           corev1.EventTypeWarning, Reason: "FailedMount", Message: message, Count: 3,
	}
	must.Get(client.CoreV1().Events("serving").Create(t.Context(), event, metav1.CreateOptions{}))(t)
	s, web := serve(t, client, ByAllocator(client))
	key := "pod/serving/embed-0"
	state := listen(t, s, web).until("explained", func(state objects) bool {
		return strings.Contains(string(state[key]), "explanation")
	})
	stuck := part[view.Pod](t, state, key)
	if !stuck.Stuck || stuck.Waiting || !strings.Contains(stuck.Explanation.Text, message) {
		t.Errorf("want a stuck pod, and its event: %+v, %s", stuck, stuck.Explanation.Text)
	}
	if got := metaOf(t, state).Summary; got.Stuck != 1 || got.Waiting != 2 {
		t.Errorf("summary %+v, want 1 stuck and 2 waiting", got)
	}
}

// TestReadOnly: whatever is asked for, the cluster is only read.
func TestReadOnly(t *testing.T) {
	client := demo(t)
	s, web := serve(t, client, nil)
	listen(t, s, web).until("loaded", func(state objects) bool { return !metaOf(t, state).Loading })
	if len(client.Actions()) == 0 {
		t.Error("nothing was read")
	}
	for _, a := range client.Actions() {
		if a.GetVerb() != "list" {
			t.Errorf("%s %s", a.GetVerb(), a.GetResource().Resource)
		}
		if a.GetResource().Group == resourceapi.GroupName && a.GetSubresource() != "" {
			t.Errorf("subresource %s", a.GetSubresource())
		}
	}
}
