// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package publish

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/utils/ptr"
)

// TestTaintDespiteRefusals: a lost GPU is tainted although the API server refuses something else, also where that comes first.
func TestTaintDespiteRefusals(t *testing.T) {
	for name, refused := range map[string]func(*http.Request) bool{
		"creates": func(r *http.Request) bool { return kindOf(r) == "write" && r.Method == http.MethodPost },
		"deletes": func(r *http.Request) bool { return kindOf(r) == "write" && r.Method == http.MethodDelete },
		"lists":   func(r *http.Request) bool { return kindOf(r) == "list" },
	} {
		t.Run(name, func(t *testing.T) {
			inCluster(t, func(t *testing.T, c *cluster) {
				one, two := inventoryOf(t, withoutShares(), firstGPU), inventoryOf(t, withoutShares(), firstGPU, secondGPU)
				before, next := one, two
				if name == "deletes" {
					before, next = two, one
				}
				r := c.start(t, "one", before)
				after(time.Minute)
				c.setFail(func(r *http.Request) *apierrors.StatusError {
					if refused(r) {
						return forbidden()
					}
					return nil
				})
				c.edit(0, func(s *resourceapi.ResourceSlice) { s.Labels = map[string]string{"somebody": "else"} })
				r.publisher.SetInventory(next)
				after(time.Minute)
				r.publisher.SetInventory(lost(next, firstGPU))
				after(time.Minute)
				if c.tainted(isLost) == 0 {
					t.Error("a minute later the lost GPU is offered")
				}
			})
		})
	}
}

// webhook is a network behind which an admission webhook changes slices.
type webhook struct {
	next   http.RoundTripper
	change func(s *resourceapi.ResourceSlice)
}

func (w webhook) RoundTrip(r *http.Request) (*http.Response, error) {
	if kindOf(r) == "write" && r.Method != http.MethodDelete {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		slice := &resourceapi.ResourceSlice{}
		if _, _, err := scheme.Codecs.UniversalDeserializer().Decode(body, nil, slice); err != nil {
			return nil, err
		}
		slice.APIVersion, slice.Kind = resourceapi.SchemeGroupVersion.String(), "ResourceSlice"
		w.change(slice)
		if body, err = json.Marshal(slice); err != nil {
			return nil, err
		}
		r = r.Clone(r.Context())
		r.Header.Set("Content-Type", "application/json")
		r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	}
	return w.next.RoundTrip(r)
}

// TestWebhookChangesAll: what is changed at each write is written ever more slowly.
func TestWebhookChangesAll(t *testing.T) {
	inCluster(t, func(t *testing.T, c *cluster) {
		n := 0
		network := webhook{c.Transport(), func(s *resourceapi.ResourceSlice) {
			n++
			for i := range s.Spec.Devices {
				s.Spec.Devices[i].Attributes["rack"] = resourceapi.DeviceAttribute{StringValue: ptr.To(fmt.Sprint(n))}
			}
		}}
		c.startOver(t, network, "one", inventoryOf(t, withoutShares(), firstGPU))
		after(time.Minute)
		c.take("")
		after(time.Hour)
		if writes := c.take("write"); writes > 40 {
			t.Errorf("%d writes in an hour", writes)
		}
	})
}
