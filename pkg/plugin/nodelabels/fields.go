// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package nodelabels

import (
	"encoding/json"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// manager is this driver's name among those who write fields of objects.
const manager = "partage-node-labels"

// writers are who wrote each label of a node last, as the API server has noted. A label whose
// value somebody else has changed since is not ours any more.
func writers(node *corev1.Node) (map[string]string, error) {
	found := map[string]string{}
	for _, entry := range node.ManagedFields {
		if entry.FieldsV1 == nil {
			continue
		}
		var fields struct {
			Metadata struct {
				Labels map[string]json.RawMessage `json:"f:labels"`
			} `json:"f:metadata"`
		}
		if err := json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields); err != nil {
			return nil, fmt.Errorf("read which fields of node %s %s has written: %w", node.Name, entry.Manager, err)
		}
		for field := range fields.Metadata.Labels {
			key, isLabel := strings.CutPrefix(field, "f:")
			if isLabel && (found[key] == "" || isOurs(entry)) {
				found[key] = entry.Manager
			}
		}
	}
	return found, nil
}

func isOurs(entry metav1.ManagedFieldsEntry) bool {
	return entry.Manager == manager && entry.Operation == metav1.ManagedFieldsOperationApply
}
