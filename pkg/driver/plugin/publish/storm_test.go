// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// TestStormOfErrors: an API server that is overloaded is not asked more often than it
// stands, for however long that lasts, and soon after it everything is stored.
func TestStormOfErrors(t *testing.T) {
	unavailable := func(retryAfter int) *apierrors.StatusError {
		return apierrors.NewGenericServerResponse(http.StatusServiceUnavailable, "", schema.GroupResource{}, "", "overloaded", retryAfter, true)
	}
	for name, tc := range map[string]struct {
		err *apierrors.StatusError
		// perMinute is the most that a node asks in a minute. The client library follows
		// Retry-After ten times before the publisher hears of it.
		perMinute int
	}{
		"429, retry after 1 s":  {apierrors.NewTooManyRequests("too many requests", 1), 120},
		"429, retry after 10 s": {apierrors.NewTooManyRequests("too many requests", 10), 30},
		"503, retry after 1 s":  {unavailable(1), 120},
		"503":                   {unavailable(0), 30},
		"500":                   {apierrors.NewInternalError(errors.New("etcd is away")), 30},
		"504":                   {apierrors.NewTimeoutError("etcd is slow", 0), 30},
	} {
		for _, which := range []string{"", "write", "list"} {
			t.Run(name+" "+which, func(t *testing.T) {
				inCluster(t, func(t *testing.T, c *cluster) {
					inventory := inventoryOf(t, withoutShares(), firstGPU)
					r := c.start(t, "one", inventory)
					after(time.Minute)
					c.setFail(func(r *http.Request) *apierrors.StatusError {
						if which == "" || kindOf(r) == which {
							return tc.err
						}
						return nil
					})
					r.publisher.SetInventory(lost(inventory, firstGPU))
					// The watch has to begin again as well.
					r.publisher.Registered()
					c.take("")
					most, all := 0, 0
					const minutes = 20
					for range minutes {
						after(time.Minute)
						requests := c.take("")
						most, all = max(most, requests), all+requests
					}
					t.Logf("%d requests in %d minutes, %d in a minute at most", all, minutes, most)
					if most > tc.perMinute {
						t.Errorf("%d requests in a minute, want %d at most", most, tc.perMinute)
					}
					if got := r.reported(); got == "" {
						t.Error("ready although nothing can be stored")
					}
					c.setFail(nil)
					c.converges(t, lost(inventory, firstGPU), AllFeatures, time.Minute)
					after(time.Minute)
					r.ready(t)
				})
			})
		}
	}
}

// sick is a network behind which watches are not what they should be.
type sick struct {
	next http.RoundTripper
	mu   sync.Mutex
	// watch answers watches while it is set.
	watch func(*http.Request) (*http.Response, error)
}

func (s *sick) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	watch := s.watch
	s.mu.Unlock()
	if watch == nil || kindOf(r) != "watch" {
		return s.next.RoundTrip(r)
	}
	go func() { _, _ = whole(s.next.RoundTrip(r)) }() // so that it is counted
	return watch(r)
}

func (s *sick) becomeWell() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watch = nil
}

func watchAnswer(r *http.Request, body io.ReadCloser) *http.Response {
	return &http.Response{
		Status: "200 OK", StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/json"}}, Body: body, Request: r,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: -1,
	}
}

// silent is a body that never comes.
type silent struct{ r *http.Request }

func (s silent) Read([]byte) (int, error) {
	<-s.r.Context().Done()
	return 0, s.r.Context().Err()
}

func (s silent) Close() error { return nil }

// TestSickWatch: where watches do not work, what others change is found nevertheless,
// later, and without a storm of requests.
func TestSickWatch(t *testing.T) {
	event := func(kind, annotations string) string {
		return fmt.Sprintf(`{"type":%q,"object":{"apiVersion":"meta.k8s.io/v1","kind":"PartialObjectMetadata",`+
			`"metadata":{"name":"x","uid":"x","resourceVersion":"1","annotations":{%s}}}}`+"\n", kind, annotations)
	}
	answer := func(text string) func(*http.Request) (*http.Response, error) {
		return func(r *http.Request) (*http.Response, error) {
			return watchAnswer(r, io.NopCloser(strings.NewReader(text))), nil
		}
	}
	for name, tc := range map[string]struct {
		watch func(*http.Request) (*http.Response, error)
		// perHour is the most that a node asks in an hour, putBack the longest time until
		// a change by others is put back.
		perHour int
		putBack time.Duration
	}{
		"opened, then silent": {
			func(r *http.Request) (*http.Response, error) { return watchAnswer(r, silent{r}), nil }, 60, 11 * time.Minute,
		},
		"never opened": {
			func(r *http.Request) (*http.Response, error) {
				<-r.Context().Done()
				return nil, r.Context().Err()
			}, 60, 11 * time.Minute,
		},
		"silent after a bookmark": {
			func(r *http.Request) (*http.Response, error) {
				body := io.MultiReader(strings.NewReader(event("BOOKMARK", `"k8s.io/initial-events-end":"true"`)), silent{r})
				return watchAnswer(r, io.NopCloser(body)), nil
			}, 60, 11 * time.Minute,
		},
		"closed at once":        {answer(""), 120, 8 * time.Minute},
		"closed after an event": {answer(event("BOOKMARK", "")), 120, 8 * time.Minute},
		"refused connections": {
			func(*http.Request) (*http.Response, error) { return nil, errors.New("connection refused") }, 900, 2 * time.Minute,
		},
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				inventory := inventoryOf(t, withoutShares(), firstGPU)
				network := &sick{next: c.Transport(), watch: tc.watch}
				r := c.startOver(t, network, "one", inventory)
				after(time.Minute)
				c.holds(t, inventory, AllFeatures)
				c.take("")
				after(time.Hour)
				watches := c.take("watch")
				requests := watches + c.take("")
				t.Logf("%d requests in an hour, of which %d are watches", requests, watches)
				if requests > tc.perHour {
					t.Errorf("%d requests in an hour, want %d at most", requests, tc.perHour)
				}
				c.DeleteSlices()
				t.Logf("put back after %s", c.converges(t, inventory, AllFeatures, tc.putBack))
				network.becomeWell()
				// One that has begun is still silent.
				after(11 * time.Minute)
				c.take("")
				c.edit(1, func(s *resourceapi.ResourceSlice) { s.Spec.Devices[0].Name = "other" })
				if took := c.converges(t, inventory, AllFeatures, 6*time.Minute); took > time.Minute {
					t.Errorf("put back after %s although watches work again", took)
				}
				r.ready(t)
			})
		})
	}
}

// TestHangingList: a list without an answer is a failure that is told, not the end of
// publishing; neither is that of the watch's own list, where the API server does not
// stream one.
func TestHangingList(t *testing.T) {
	for _, kind := range []string{"list", "list of metadata"} {
		t.Run(kind, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				hang := func(r *http.Request) *apierrors.StatusError {
					switch {
					case kindOf(r) == kind:
						<-r.Context().Done()
					case r.URL.Query().Has("sendInitialEvents"):
						return apierrors.NewInvalid(schema.GroupKind{}, "", nil)
					}
					return nil
				}
				c.setFail(hang)
				inventory := inventoryOf(t, withoutShares(), firstGPU)
				r := c.start(t, "one", inventory)
				after(5 * time.Minute)
				got := r.reported()
				if kind == "list" && !strings.Contains(got, "list ResourceSlices") || kind != "list" && got != "" {
					t.Errorf("reported %q", got)
				}
				c.take("")
				after(time.Hour)
				if requests := c.take(""); requests > 7*60 {
					t.Errorf("%d requests in an hour", requests)
				} else {
					t.Logf("%d requests in an hour", requests)
				}
				c.setFail(nil)
				c.converges(t, inventory, AllFeatures, 2*time.Minute)
				after(2 * time.Minute)
				c.DeleteSlices()
				if took := c.converges(t, inventory, AllFeatures, time.Minute); took > 2*time.Second {
					t.Errorf("put back after %s", took)
				}
				after(time.Minute)
				r.ready(t)
			})
		})
	}
}
