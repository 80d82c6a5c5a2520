// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// An instance that hangs in the kernel cannot be killed and keeps its locks. The
// one that follows tells of it.
func TestSurveyOfGPUThatNobodyGivesBack(t *testing.T) {
	synctest.Test(t, testSurveyOfGPUThatNobodyGivesBack)
}

func testSurveyOfGPUThatNobodyGivesBack(t *testing.T) {
	b := newBox(t)
	release, err := b.manager().locks.GPUs(t.Context(), []string{pciA})
	if err != nil || release == nil {
		t.Fatal(err)
	}
	m := b.manager()
	const elsewhereLimit = 2 * time.Minute
	for _, test := range []struct {
		after time.Duration
		want  []string
	}{
		{0, nil},
		{elsewhereLimit - 10*time.Second, nil},
		{20 * time.Second, []string{"unresponsive " + pciA + " whole"}},
	} {
		time.Sleep(test.after)
		if diff := cmp.Diff(test.want, findings(survey(t.Context(), m))); diff != "" {
			t.Errorf("after %s: -want +got:\n%s", test.after, diff)
		}
		if unlooked := m.Unlooked(); len(unlooked) > 0 != (test.want == nil) {
			t.Errorf("after %s: unlooked are %v", test.after, unlooked)
		}
	}
	release()
	if got := findings(survey(t.Context(), m)); len(got) > 0 {
		t.Errorf("when it is back: %v", got)
	}
	// One that this process has is a claim at work, however long.
	release, err = m.locks.GPUs(t.Context(), []string{pciA})
	if err != nil || release == nil {
		t.Fatal(err)
	}
	defer release()
	for range 2 {
		if got := findings(survey(t.Context(), m)); len(got) > 0 {
			t.Errorf("at work: %v", got)
		}
		time.Sleep(2 * elsewhereLimit)
	}
}
