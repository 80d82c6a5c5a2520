// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package tenant makes texts fit for a tenant, who reads them in the status and the events of a claim and of its pods: in one line, cut, and
// without what others have on the node. The log, and the events of the node, have all of it.
package tenant

import (
	"errors"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/partage-dev/partage/pkg/util/panics"
	"github.com/partage-dev/partage/pkg/util/quote"
)

// MaxError is how long an error may be that the kubelet gets, in bytes. It makes an event of the pod of it, with a beginning of its own.
const MaxError = 800

// Error returns what the kubelet gets of an error about a claim, or nil: a text for tenants. What a defect of the driver says may be
// anything.
func Error(err error, namespace string, uid types.UID) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, panics.ErrDefect):
		return errors.New(panics.ErrDefect.Error() + ": the log of the driver's pod on this node has it")
	}
	return errors.New(Text(err.Error(), namespace, uid, MaxError))
}

// named are the forms in which texts name claims and processes in pods, with the namespace as the group. It is one constructor that makes
// each: record.Ref and unclaimed.Claim, with the pods that use it, and holder.Process, whose program has chosen its name, in quotes where that
// could be taken for something else. Either may have been cut. TestFormsOfClaims and TestErrorsNameNoOtherTenant see to it.
var named = []struct {
	form    *regexp.Regexp
	instead string
}{
	{regexp.MustCompile(`claim ([\w.-]+)/[\w.-]+(?: \([^)]*\)?)?`), "a claim of another namespace"},
	{regexp.MustCompile(`process \d+ \((?:"(?:\\.|[^"\\])*"…?, )?[^)]*?pod (?:([\w.-]+)/|with UID )[^)]*\)?`), "a process of a pod that is not named here"},
}

// identifiers are UIDs, also the beginning of one, and names of files and of CDI devices, of which some have a UID in them. Those of GPUs and
// partitions are nobody's.
var (
	identifier  = regexp.MustCompile(`(?i)((?:GPU|MIG)-)?[0-9a-f]{8}-[0-9a-f]{4}[0-9a-f-]*`)
	identifiers = regexp.MustCompile(`[\w.=@+-]*(?:/[\w.=@+-]+)+|` + identifier.String())
)

// Text returns a text about a claim without names of other namespaces, and without UIDs but the claim's own. Without a namespace it is for
// the users of several claims.
func Text(text, namespace string, uid types.UID, limit int) string {
	for _, n := range named {
		text = n.form.ReplaceAllStringFunc(text, func(found string) string {
			if of := n.form.FindStringSubmatch(found)[1]; of != "" && of == namespace {
				return found
			}
			return n.instead
		})
	}
	text = identifiers.ReplaceAllStringFunc(text, func(found string) string {
		isOfOther := func(id []string) bool { return id[1] == "" && !strings.EqualFold(id[0], string(uid)) }
		switch {
		case uid != "" && strings.Contains(found, string(uid)), !slices.ContainsFunc(identifier.FindAllStringSubmatch(found, -1), isOfOther):
			return found
		case strings.Contains(found, "/"):
			return "what the driver's log names"
		}
		return "(another UID)"
	})
	return quote.Line(text, limit)
}
