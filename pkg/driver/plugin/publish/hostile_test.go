// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/policy"
)

// TestQuestionsUseNewConnections: with TLS, as every API server has it, a question for
// the features goes over a connection of its own.
func TestQuestionsUseNewConnections(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	connections, protocols := map[string]bool{}, map[string]bool{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		connections[r.RemoteAddr], protocols[r.Proto] = true, true
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write([]byte(`{"gitVersion":"v1.37.0"}`))
	}))
	server.EnableHTTP2 = true
	server.StartTLS()
	t.Cleanup(server.Close)
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL, QPS: -1, TLSClientConfig: rest.TLSClientConfig{Insecure: true}})
	if err != nil {
		t.Fatal(err)
	}
	f := features{pool: pool{driverName: testDriver, nodeName: testNode}, client: client.ResourceV1().RESTClient()}
	const questions = 4
	for range questions {
		if _, err := f.serverVersion(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if len(connections) != questions {
		t.Errorf("%d questions used %d connections (%v)", questions, len(connections), protocols)
	}
}

// lossy carries requests whose answers are lost, delayed, or which are refused.
type lossy struct {
	next http.RoundTripper
	mu   sync.Mutex
	rand *rand.Rand
	calm bool
}

func (l *lossy) RoundTrip(r *http.Request) (*http.Response, error) {
	l.mu.Lock()
	what, delay, calm := l.rand.IntN(12), time.Duration(l.rand.IntN(4000))*time.Millisecond, l.calm
	l.mu.Unlock()
	if calm || kindOf(r) == "watch" {
		return l.next.RoundTrip(r)
	}
	time.Sleep(delay)
	switch what {
	case 0, 1:
		return nil, errors.New("connection refused")
	case 2, 3:
		_, _ = whole(l.next.RoundTrip(r))
		return nil, errors.New("connection reset")
	}
	answer, err := whole(l.next.RoundTrip(r))
	time.Sleep(delay)
	return answer, err
}

// whole reads an answer: the server is locked until then.
func whole(answer *http.Response, err error) (*http.Response, error) {
	if err != nil {
		return nil, err
	}
	body, err := io.ReadAll(answer.Body)
	answer.Body = io.NopCloser(bytes.NewReader(body))
	return answer, err
}

func (l *lossy) becomeCalm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calm = true
}

// TestChaos: whatever happens for some minutes, afterwards the right slices are there, and
// stay without further writes.
func TestChaos(t *testing.T) {
	for seed := range uint64(chaosSeeds) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				random := rand.New(rand.NewPCG(seed, 7))
				inventories := []*device.Inventory{
					inventoryOf(t, withoutShares(), firstGPU, secondGPU), inventoryOf(t, withoutShares(), firstGPU),
					inventoryOf(t, policy.Builtin(), firstGPU, secondGPU), inventoryOf(t, onlyShares(), firstGPU, secondGPU),
					inventoryOf(t, onlyShares()),
				}
				inventories = append(inventories, lost(inventories[0], firstGPU), lost(inventories[2], secondGPU))
				network := &lossy{next: c.Transport(), rand: random}
				older := c.startOver(t, network, "old", inventories[0])
				newer := (*rig)(nil)
				for range 40 {
					network.mu.Lock()
					pause := time.Duration(random.IntN(9000)) * time.Millisecond
					network.mu.Unlock()
					time.Sleep(pause)
					network.mu.Lock()
					action, n := random.IntN(10), random.IntN(len(inventories))
					network.mu.Unlock()
					slices := c.Slices()
					switch {
					case action < 4:
						older.publisher.SetInventory(inventories[n])
						if newer != nil {
							newer.publisher.SetInventory(inventories[(n+1)%len(inventories)])
						}
					case action == 4 && len(slices) > 0:
						c.DeleteSlice(slices[n%len(slices)].Name)
					case action == 5:
						c.DeleteSlices()
					case action == 6 && len(slices) > 0:
						c.EditSlice(slices[n%len(slices)].Name, func(s *resourceapi.ResourceSlice) { s.Spec.Pool.Generation += 3; s.Spec.Devices = nil })
					case action == 7 && newer == nil:
						newer = c.startOver(t, network, "new", inventories[n])
					case action == 8 && newer != nil:
						newer.stop()
						newer = nil
					case action == 9:
						c.DeleteNode()
						c.DeleteSlices()
						c.AddNode()
						older.publisher.Registered()
					}
				}
				network.becomeCalm()
				last := older
				if newer != nil {
					last = newer
				}
				last.publisher.SetInventory(inventories[0])
				c.converges(t, inventories[0], AllFeatures, 11*time.Minute)
				after(time.Minute)
				last.ready(t)
				c.rests(t, inventories[0])
			})
		})
	}
}

const chaosSeeds = 20

// TestNameIsTaken: a slice of another driver, or of another node, has the name of one that
// this node needs. The admission policy keeps plugins from that; where somebody else made
// it, the node says which slice it is, and publishes as soon as that is gone.
func TestNameIsTaken(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		client, err := kubernetes.NewForConfig(&rest.Config{Host: "http://cluster", Transport: c.Transport(), QPS: -1})
		if err != nil {
			t.Fatal(err)
		}
		other := "node-2"
		_, err = client.ResourceV1().ResourceSlices().Create(t.Context(), &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: pool{driverName: testDriver, nodeName: testNode}.sliceName(0)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: testDriver, NodeName: &other, Pool: resourceapi.ResourcePool{Name: other, Generation: 1, ResourceSliceCount: 1},
			},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		inventory := inventoryOf(t, withoutShares(), firstGPU)
		r := c.start(t, "one", inventory)
		after(10 * time.Minute)
		name := c.Slices()[0].Name
		if got, requests := r.reported(), c.take(""); !strings.Contains(got, name) || requests > 120 {
			t.Errorf("%d requests in ten minutes, reported %q", requests, got)
		}
		c.DeleteSlice(name)
		c.converges(t, inventory, AllFeatures, time.Minute)
	})
}

// TestPrecedenceOfDeletedLockFile: two instances that do not know of each other write ever
// more slowly.
func TestPrecedenceOfDeletedLockFile(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		both, one := inventoryOf(t, withoutShares(), firstGPU, secondGPU), inventoryOf(t, withoutShares(), firstGPU)
		c.start(t, "old", both)
		after(time.Minute)
		if err := os.Remove(c.lockFile); err != nil {
			t.Fatal(err)
		}
		c.start(t, "new", one)
		after(time.Minute)
		c.take("")
		after(time.Hour)
		if writes := c.take("write"); writes > 80 {
			t.Errorf("%d writes in an hour without a common lock file", writes)
		}
	})
}
