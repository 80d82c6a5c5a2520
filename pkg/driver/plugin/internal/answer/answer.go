// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package answer says what answers of the API server mean.
package answer

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// IsMissing reports whether an object does not exist. A path that is not served, or a proxy's "404 page not found", does not say that.
func IsMissing(err error) bool {
	return apierrors.IsNotFound(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse)
}

// Claim reads a claim. It returns nil when there is none with this UID, or with this name where there is no UID.
func Claim(ctx context.Context, client kubernetes.Interface, ref claim.Ref, o metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	found, err := client.ResourceV1().ResourceClaims(ref.Namespace).Get(ctx, ref.Name, o)
	switch {
	case IsMissing(err), err == nil && ref.UID != "" && found.UID != ref.UID:
		return nil, nil //nolint:nilnil // not finding it is an answer, and a claim with another UID is another claim
	case err != nil:
		return nil, fmt.Errorf("ask the API server for claim %s: %w", ref, err)
	}
	return found, nil
}
