// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package uninstall finds what an uninstallation of the driver would break: pods that
// use its claims can neither start nor end without a plugin on their node.
package uninstall

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/pager"
	"k8s.io/klog/v2"
)

const (
	// requestTimeout is about how long the API server itself works on a request.
	requestTimeout = time.Minute
	// pageSize keeps single answers to a few megabytes.
	pageSize = 2000
	// maxListed bounds what people have to read.
	maxListed = 50
)

// ClaimLister lists the claims of all namespaces; client-go's client does.
type ClaimLister interface {
	List(ctx context.Context, options metav1.ListOptions) (*resourceapi.ResourceClaimList, error)
}

// Usage is a claim that is in use.
type Usage struct {
	// Nodes are where its devices are. There is one, unless a claim is shared between
	// drivers in unusual ways.
	Nodes []string
	// Claim is "namespace/name".
	Claim string
	// Devices and Consumers are names; consumers are pods except in new kinds of
	// workloads.
	Devices, Consumers []string
}

func (u Usage) String() string {
	return fmt.Sprintf("node %s: claim %s has %s, used by %s",
		strings.Join(u.Nodes, ", "), u.Claim, strings.Join(u.Devices, ", "), strings.Join(u.Consumers, ", "))
}

// InUseError says which claims are in use.
type InUseError struct {
	DriverName string
	Usages     []Usage
}

func (e *InUseError) Error() string {
	var text strings.Builder
	fmt.Fprintf(&text, "claims with devices of %s that are in use: %d", e.DriverName, len(e.Usages))
	for n, usage := range e.Usages {
		if n == maxListed {
			fmt.Fprintf(&text, "\n  and %d more", len(e.Usages)-maxListed)
			break
		}
		text.WriteString("\n  " + usage.String())
	}
	return text.String()
}

// Check returns an *InUseError when claims have devices of the driver and are in use.
// It asks until there is an answer or ctx ends.
func Check(ctx context.Context, claims ClaimLister, driverName string) error {
	var usages []Usage
	err := untilDone(ctx, func() (err error) {
		usages, err = list(ctx, claims, driverName)
		return err
	}, apierrors.IsResourceExpired) // pages that were read too slowly do not belong together
	if err != nil {
		return fmt.Errorf("list the claims of all namespaces: %w", err)
	}
	if len(usages) == 0 {
		return nil
	}
	slices.SortFunc(usages, func(a, b Usage) int {
		return cmp.Or(slices.Compare(a.Nodes, b.Nodes), cmp.Compare(a.Claim, b.Claim))
	})
	return &InUseError{DriverName: driverName, Usages: usages}
}

// untilDone tries again, more and more slowly, what fails for such a reason, until ctx ends.
func untilDone(ctx context.Context, try func() error, again func(error) bool) error {
	var problem error
	retry := wait.Backoff{Duration: time.Second, Factor: 2, Jitter: 0.1, Steps: 10, Cap: 10 * time.Second}
	err := retry.DelayFunc().Until(ctx, true, true, func(ctx context.Context) (bool, error) {
		problem = try()
		if problem != nil && again(problem) {
			klog.FromContext(ctx).Info("Could not list the claims, will retry", "reason", problem)
			return false, nil
		}
		return true, problem
	})
	if err != nil {
		return cmp.Or(problem, err)
	}
	return nil
}

// list asks again for a page that fails, so that one request that is lost in a large cluster does not cost all that was read before.
// Also where access is refused: the role that allows it may be seconds old.
func list(ctx context.Context, claims ClaimLister, driverName string) (usages []Usage, err error) {
	pages := pager.New(func(ctx context.Context, options metav1.ListOptions) (page runtime.Object, err error) {
		err = untilDone(ctx, func() error {
			limited, cancel := context.WithTimeout(ctx, requestTimeout)
			defer cancel()
			page, err = claims.List(limited, options)
			return err
		}, func(err error) bool { return !apierrors.IsResourceExpired(err) })
		return page, err
	})
	pages.PageSize = pageSize
	err = pages.EachListItem(ctx, metav1.ListOptions{}, func(object runtime.Object) error {
		if claim, ok := object.(*resourceapi.ResourceClaim); ok {
			if usage, inUse := usageOf(claim, driverName); inUse {
				usages = append(usages, usage)
			}
		}
		return nil
	})
	return usages, err
}

// usageOf reports whether pods use devices of the driver through the claim. Without
// consumers the kubelet has released the devices.
func usageOf(claim *resourceapi.ResourceClaim, driverName string) (Usage, bool) {
	usage := Usage{Claim: claim.Namespace + "/" + claim.Name}
	if claim.Status.Allocation == nil || len(claim.Status.ReservedFor) == 0 {
		return usage, false
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driverName {
			// This driver names its pools after the nodes.
			usage.Nodes = append(usage.Nodes, result.Pool)
			usage.Devices = append(usage.Devices, result.Device)
		}
	}
	for _, consumer := range claim.Status.ReservedFor {
		usage.Consumers = append(usage.Consumers, strings.TrimSuffix(consumer.Resource, "s")+" "+consumer.Name)
	}
	slices.Sort(usage.Nodes)
	usage.Nodes = slices.Compact(usage.Nodes)
	return usage, len(usage.Devices) > 0
}
