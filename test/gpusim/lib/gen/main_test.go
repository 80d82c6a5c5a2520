// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	header := `
/* nvmlReturn_t DECLDIR nvmlInBlockComment(void); */
// nvmlReturn_t DECLDIR nvmlInLineComment(void);
const DECLDIR char* nvmlErrorString(nvmlReturn_t result);
nvmlReturn_t DECLDIR nvmlInit_v2(void);
DEPRECATED(13.0) nvmlReturn_t DECLDIR nvmlOld(nvmlDevice_t device);
nvmlReturn_t DECLDIR nvmlLong(nvmlDevice_t device, //!< which
                              unsigned int *count);
typedef nvmlReturn_t (*nvmlCallback)(void);
`
	want := map[string]string{
		"nvmlInit_v2": "void",
		"nvmlOld":     "nvmlDevice_t device",
		"nvmlLong":    "nvmlDevice_t device, unsigned int *count",
	}
	got := parse(header)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("functions (-want +got):\n%s", diff)
	}
	text := string(source(got))
	line := `STUB nvmlLong(nvmlDevice_t device, unsigned int *count) { return unmodelled("nvmlLong"); }`
	if !strings.Contains(text, line) {
		t.Errorf("no line %q in\n%s", line, text)
	}
}
