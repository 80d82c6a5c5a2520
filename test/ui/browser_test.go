// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	kubetesting "k8s.io/client-go/testing"

	"github.com/partage-dev/partage/test/kubectl/fleets"
)

// limit is for a test that hangs.
const limit = 5 * time.Minute

// browser is a page under test.
type browser struct {
	*Page
	t *testing.T
}

func open(t *testing.T, make func() ([]runtime.Object, error), prepare ...func(*fake.Clientset)) browser {
	t.Helper()
	objects, err := make()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	page, err := Open(ctx, objects, 1440, 1000, prepare...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := page.Close(); err != nil {
			t.Error(err)
		}
	})
	return browser{page, t}
}

func (b browser) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	if err := b.Do(steps...); err != nil {
		b.t.Fatalf("%v; the page has complained: %q", err, b.Errors())
	}
}

func (b browser) wait(expression string) {
	b.t.Helper()
	if err := b.Wait(expression); err != nil {
		b.t.Fatal(err)
	}
}

// measured waits for what claims use, which comes later than they do, and changes how all nodes look.
func (b browser) measured() {
	b.t.Helper()
	b.wait("[...document.querySelectorAll('#summary div')].some((tile) => tile.innerText.includes('Memory used') && !tile.innerText.includes('unknown'))")
}

func (b browser) click(selector string) {
	b.t.Helper()
	b.wait("document.querySelector(" + quote(selector) + ")")
	b.do(chromedp.Click(chromedp.CSS(selector)))
}

// text returns what is visible of the first element.
func (b browser) text(selector string) string {
	b.t.Helper()
	text, err := chromedp.Run(b.Context, chromedp.Evaluate[string]("document.querySelector("+quote(selector)+")?.innerText ?? ''"))
	if err != nil {
		b.t.Fatal(err)
	}
	return text
}

func (b browser) number(expression string) int {
	b.t.Helper()
	n, err := chromedp.Run(b.Context, chromedp.Evaluate[int](expression))
	if err != nil {
		b.t.Fatal(err)
	}
	return n
}

// shows waits until the details are about something, and say something.
func (b browser) shows(title string, texts ...string) {
	b.t.Helper()
	b.wait("document.querySelector('#detail-title')?.innerText === " + quote(title))
	for _, text := range texts {
		b.wait("document.querySelector('#detail').innerText.includes(" + quote(text) + ")")
	}
}

func (b browser) complains() {
	b.t.Helper()
	if all := b.Errors(); len(all) > 0 {
		b.t.Errorf("the page complains: %q", all)
	}
}

func quote(s string) string { return fmt.Sprintf("%q", s) }

// card is the selector of the card of a GPU.
func card(node, gpu string) string {
	return fmt.Sprintf("[data-gpu='gpu/%s/gpu-0000-%s-00-0']", node, gpu)
}

func TestBrowse(t *testing.T) {
	b := open(t, fleets.Demo)
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelector('[data-claim=\"claim/ci/runner-a\"]')")

	// What is on the page.
	for selector, texts := range map[string][]string{
		"#summary":           {"14", "on 3 nodes", "10", "by 21 claims", "Waiting pods", "Unhealthy"},
		"#connection":        {"Live"},
		card("dgx-1", "1b"):  {"GPU 0", "embed-0", "2g.20gb", "notebook-lin", "1g.10gb", "free", "fits 1 × 1g.20gb"},
		card("dgx-1", "28"):  {"llm-small-0", "4g.40gb", "llm-small-1", "3g.40gb", "full", "watched"},
		card("dgx-1", "35"):  {"MPS", "3 of 4 shares taken", "api-0", "24 GiB", "40 %", "27 GiB"},
		card("dgx-1", "42"):  {"pretrain-0", "whole GPU"},
		card("dgx-1", "5c"):  {"XID 94", "finetune-7b"},
		card("dgx-1", "76"):  {"exists, free"},
		card("hgx-2", "35"):  {"release pending", "protein-fold"},
		card("edge-3", "1b"): {"time slices", "2 of 4 shares taken", "runner-a", "runner-b"},
		card("edge-3", "28"): {"throttled", "whole GPU"},
	} {
		shown := b.text(selector)
		for _, text := range texts {
			if !strings.Contains(shown, text) {
				t.Errorf("%s lacks %q:\n%s", selector, text, shown)
			}
		}
	}

	// From GPU to claim to pod, and back.
	b.click(card("dgx-1", "1b") + " .gpu-name")
	b.shows("GPU 0 (1b:00) on dgx-1", "NVIDIA H100 80GB HBM3", "research/notebook-lin", "What still fits")
	b.click("#detail .list a[href='#/claim/research/notebook-lin']")
	b.shows("research/notebook-lin", "in use", "GPU 0 (1b:00) on dgx-1", "1g.10gb", "Running on dgx-1", "1 × mig.nvidia.com")
	b.wait("document.querySelectorAll('main [data-claim].selected').length === 1")
	b.click("#detail a[href='#/pod/research/notebook-lin']")
	b.wait("document.querySelector('#detail .kind').innerText === 'Pod'")
	b.shows("research/notebook-lin", "Running", "dgx-1", "kubectl gpu explain")
	b.do(chromedp.NavigateBack())
	b.wait("document.querySelector('#detail .kind').innerText === 'Claim'")
	b.do(chromedp.NavigateBack())
	b.shows("GPU 0 (1b:00) on dgx-1")
	b.do(chromedp.NavigateBack())
	b.wait("document.querySelector('#detail').hidden")

	// A strip leads to the claim, and Escape back to the strip.
	b.click("main [data-claim='claim/training/finetune-7b']")
	b.shows("training/finetune-7b", "GPUXID", "contained memory error")
	b.do(chromedp.KeyEvent(kb.Escape))
	b.wait("document.querySelector('#detail').hidden && document.activeElement.dataset.claim === 'claim/training/finetune-7b'")

	// A waiting pod, in the words of explain.
	b.wait("document.querySelector('#waiting').innerText.includes('No device has profile 1g.12gb')")
	b.click("#waiting a[href='#/pod/research/notebook-kim']")
	b.shows("research/notebook-kim", "Why it waits", "What would help:", "with profile 1g.10gb in place of 1g.12gb")

	// Selection and filter survive a reload.
	b.do(chromedp.SendKeys(chromedp.CSS("#filter-text"), "embed 2g.20gb"))
	b.wait("document.querySelectorAll('#nodes .gpu').length === 1")
	b.do(chromedp.Reload())
	b.wait("document.querySelectorAll('#nodes .gpu').length === 1")
	b.shows("research/notebook-kim", "Why it waits")
	b.click("#filter-clear")
	b.wait("document.querySelectorAll('#nodes .gpu').length === 14")
	b.complains()
}

func TestFollow(t *testing.T) {
	b := open(t, fleets.Demo)
	b.do(chromedp.Navigate(b.URL + "#/claim/research/notebook-lin"))
	b.shows("research/notebook-lin", "in use")
	b.do(chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
		_, err := chromedp.Run(ctx, chromedp.Evaluate[bool]("window.neverReloaded = true"))
		return err
	}))

	// A claim ends: its place is free, and the details say that it is gone.
	lin := "[data-gpu='gpu/dgx-1/gpu-0000-1b-00-0'] [data-claim='claim/research/notebook-lin']"
	b.wait("document.querySelector(" + quote(lin) + ")")
	free := b.number("document.querySelectorAll(\"[data-gpu='gpu/dgx-1/gpu-0000-1b-00-0'] .free\").length")
	claims := b.Client.ResourceV1().ResourceClaims("research")
	if err := claims.Delete(t.Context(), "notebook-lin", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.wait("!document.querySelector(" + quote(lin) + ")")
	b.wait("document.querySelector('#detail').innerText.includes('There is no such claim')")
	if now := b.number("document.querySelectorAll(\"[data-gpu='gpu/dgx-1/gpu-0000-1b-00-0'] .free\").length"); now != free+1 {
		t.Errorf("%d free slices, want one more than %d", now, free)
	}
	b.wait("document.querySelector('#summary').innerText.includes('by 20 claims')")

	// A pod that waits ends.
	if err := b.Client.CoreV1().Pods("training").Delete(t.Context(), "pretrain-1", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.wait("document.querySelector('#waiting-title').innerText === '1 waiting pod'")
	b.wait("window.neverReloaded")

	// The server ends.
	b.complains()
	b.StopServer()
	b.wait("document.querySelector('#connection').innerText.startsWith('Connection lost')")
	b.wait("document.querySelector('main').innerText.includes('embed-0')") // what was known stays
}

// TestReconnect has the page ask again after the connection was cut: it draws what has changed meanwhile, and nothing else.
func TestReconnect(t *testing.T) {
	b := open(t, fleets.Demo)
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelector('[data-claim=\"claim/ci/runner-a\"]')")
	b.measured()
	b.wait("(window.others = [...document.querySelectorAll('.node')].filter((n) => !n.matches(\"[data-node='node/dgx-1']\"))).length === 2")
	b.Cut()
	if err := b.Client.ResourceV1().ResourceClaims("research").Delete(t.Context(), "notebook-lin", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.wait("document.querySelector('#connection').innerText === 'Live'")
	b.wait("!document.querySelector('[data-claim=\"claim/research/notebook-lin\"]')")
	if n := b.number("window.others.filter((n) => n.isConnected).length"); n != 2 {
		t.Errorf("%d nodes that have not changed were left as they were, want 2", n)
	}
}

func TestMissingRights(t *testing.T) {
	b := open(t, fleets.Demo, func(client *fake.Clientset) {
		client.PrependReactor("list", "nodes", func(kubetesting.Action) (bool, runtime.Object, error) {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "", nil)
		})
	})
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelector('#problems').innerText.includes('You may not list nodes')")
	b.wait("document.querySelectorAll('#nodes .gpu').length === 14")
	b.complains()
}

// TestLarge has the page show more GPUs than fit as strips.
func TestLarge(t *testing.T) {
	const nodes = 200
	b := open(t, func() ([]runtime.Object, error) { return fleets.Large(nodes) })
	start := time.Now()
	b.do(chromedp.Navigate(b.URL))
	b.wait(fmt.Sprintf("document.querySelectorAll('.overview .mini').length === %d", 8*nodes))
	b.measured()
	t.Logf("%d nodes are shown after %v", nodes, time.Since(start).Round(10*time.Millisecond))

	// One node changes, and only that is drawn anew.
	target := "[data-node='node/node-050']"
	b.wait(fmt.Sprintf("(window.others = [...document.querySelectorAll('.node')].filter((n) => !n.matches(%q))).length === %d", target, nodes-1))
	pool := b.Client.CoreV1().Nodes()
	node, err := pool.Get(t.Context(), "node-050", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	node.Spec.Unschedulable = true
	if _, err := pool.Update(t.Context(), node, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.wait("document.querySelector(" + quote(target) + ").textContent.includes('cordoned')")
	b.wait("window.others.every((n) => n.isConnected)")

	// A GPU leads to its details, and a filter to strips.
	b.click("[data-node='node/node-000'] .mini")
	b.shows("GPU 0 (1b:00) on node-000")
	b.do(chromedp.SendKeys(chromedp.CSS("#filter-text"), "node-050"))
	b.wait("document.querySelectorAll('#nodes .gpu').length === 8")
	b.complains()
}

// TestUsage: how much memory is used is inside each strip, and whether anything runs.
func TestUsage(t *testing.T) {
	b := open(t, fleets.Demo)
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelectorAll('#nodes .block.claimed .meter').length > 10 && document.querySelectorAll('#nodes .part .meter').length > 4")
	b.wait("document.querySelector('#summary').innerText.match(/Memory used\\s+[1-9][0-9]* GiB of/)")
	if n := b.number("[...document.querySelectorAll('#nodes .block.claimed')].filter((e) => e.innerText.match(/idle [0-9]+ h|[0-9]+ %/)).length"); n < 10 {
		t.Errorf("%d blocks say how busy they are", n)
	}
	// The meter is within its block, and as long as what is used.
	if n := b.number(`[...document.querySelectorAll('#nodes .meter')].filter((m) => {
		const inner = m.getBoundingClientRect(), outer = m.parentElement.getBoundingClientRect();
		return inner.left < outer.left || inner.right > outer.right || inner.bottom > outer.bottom;
	}).length`); n > 0 {
		t.Errorf("%d meters are outside of their blocks", n)
	}
	b.click(card("dgx-1", "1b") + " .gpu-name")
	b.shows("GPU 0 (1b:00) on dgx-1", "Memory used: ", "7: memory slices; one that no partition takes alone is in the cell before it")
	b.complains()
}

// TestNeighbours: claims beside each other have different colours.
func TestNeighbours(t *testing.T) {
	b := open(t, fleets.Demo)
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelector('[data-claim=\"claim/ci/runner-a\"]')")
	if n := b.number(`[...document.querySelectorAll('#nodes .node')].flatMap((node) => {
		const all = [...node.querySelectorAll('.block.claimed, .part:not([aria-hidden])')];
		return all.slice(1).filter((e, i) => e.dataset.claim !== all[i].dataset.claim && e.style.getPropertyValue('--claim') === all[i].style.getPropertyValue('--claim'));
	}).length`); n > 0 {
		t.Errorf("%d claims have the colour of the one before them", n)
	}
	b.complains()
}

// TestBadges: a GPU of which much is to be said has room for all of it.
func TestBadges(t *testing.T) {
	b := open(t, fleets.Demo, func(client *fake.Clientset) {
		for i, key := range []string{"team-b.example.com/reserved-for-training", "maintenance.example.com/window", "third.example.com/and-one-more-taint"} {
			rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("rule-", i)}, Spec: resourceapi.DeviceTaintRuleSpec{
				DeviceSelector: &resourceapi.DeviceTaintSelector{Driver: new(fleets.Driver)},
				Taint:          resourceapi.DeviceTaint{Key: key, Value: "yes", Effect: resourceapi.DeviceTaintEffectNoSchedule},
			}}
			if err := client.Tracker().Add(rule); err != nil {
				t.Fatal(err)
			}
		}
	})
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelectorAll('#nodes .badge').length >= 42")
	if n := b.number(`[...document.querySelectorAll('#nodes .gpu')].flatMap((gpu) => {
		const outer = gpu.getBoundingClientRect();
		const parts = [...gpu.querySelectorAll('header > *')].map((e) => e.getBoundingClientRect());
		const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
		return parts.filter((p, i) => p.right > outer.right + 1 || parts.some((o, k) => k < i && over(p, o)));
	}).length`); n > 0 {
		t.Errorf("%d badges cover something", n)
	}
	// That a GPU is kept for somebody is no fault of it: one has a fault of its own.
	b.wait("document.querySelector('#summary').innerText.match(/Unhealthy\\s+1$/)")
	b.complains()
}

// TestManyWaiting: the list of waiting pods scrolls, and shows that there are more.
func TestManyWaiting(t *testing.T) {
	b := open(t, func() ([]runtime.Object, error) {
		objects, err := fleets.Large(3)
		for _, o := range objects {
			if pod, is := o.(*corev1.Pod); is && strings.HasPrefix(pod.Name, "wait-") {
				another := pod.DeepCopy()
				another.Name, another.UID = "also-"+pod.Name, "also-"+pod.UID
				objects = append(objects, another)
			}
		}
		return objects, err
	})
	b.do(chromedp.Navigate(b.URL))
	b.wait("document.querySelector('#waiting-title').innerText === '24 waiting pods' && document.querySelectorAll('#waiting-list > li').length === 24")
	b.wait("(window.list = document.querySelector('#waiting-list')).scrollHeight > list.clientHeight && list.classList.contains('more')")
	b.wait("list.lastElementChild.scrollIntoView() || list.lastElementChild.getBoundingClientRect().bottom <= list.getBoundingClientRect().bottom + 1")
	b.wait("!list.classList.contains('more')")
	b.complains()
}
