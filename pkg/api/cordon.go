// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"unicode"
)

// CordonAnnotation of a Node names the GPUs that the driver keeps pods away from.
const CordonAnnotation = "partage.dev/cordoned-gpus"

// CordonedGPUs returns what the annotation names: PCI addresses, unless somebody wrote something else. Commas, semicolons and white
// space separate them.
func CordonedGPUs(annotations map[string]string) []string {
	return strings.FieldsFunc(annotations[CordonAnnotation], func(r rune) bool { return r == ',' || r == ';' || unicode.IsSpace(r) })
}
