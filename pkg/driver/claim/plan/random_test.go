// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/device"
	"github.com/partage-dev/partage/pkg/driver/claim/record"
	"github.com/partage-dev/partage/pkg/gpu"
	"github.com/partage-dev/partage/test/expect"
	"github.com/partage-dev/partage/test/must"
)

// Steps on the way to a text in an object that are no numbers of fields.
const (
	pointer = -1 - iota
	firstElement
	mapKey
)

// texts of an object's type: the way to each.
func textsIn(of reflect.Type, way []int) (ways [][]int) {
	way = way[:len(way):len(way)]
	switch of.Kind() {
	case reflect.String:
		return [][]int{way}
	case reflect.Pointer:
		return textsIn(of.Elem(), append(way, pointer))
	case reflect.Slice:
		if of.Elem().Kind() == reflect.Uint8 {
			return nil
		}
		return textsIn(of.Elem(), append(way, firstElement))
	case reflect.Map:
		return [][]int{append(way, mapKey)}
	case reflect.Struct:
		switch of {
		case reflect.TypeFor[resource.Quantity](), reflect.TypeFor[metav1.Time](), reflect.TypeFor[runtime.RawExtension]():
			return nil
		}
		for i := range of.NumField() {
			ways = append(ways, textsIn(of.Field(i).Type, append(way, i))...)
		}
	}
	return ways
}

// setText sets the text at the end of a way, and makes what is missing on it. It returns
// the name of the field.
func setText(in reflect.Value, way []int, text string) (name string) {
	for _, step := range way {
		switch step {
		case pointer:
			if in.IsNil() {
				in.Set(reflect.New(in.Type().Elem()))
			}
			in = in.Elem()
		case firstElement:
			if in.Len() == 0 {
				in.Set(reflect.Append(in, reflect.Zero(in.Type().Elem())))
			}
			in = in.Index(0)
		case mapKey:
			key := reflect.ValueOf(text).Convert(in.Type().Key())
			in.Set(reflect.MakeMap(in.Type()))
			in.SetMapIndex(key, reflect.Zero(in.Type().Elem()))
			return name + " key"
		default:
			name += "." + in.Type().Field(step).Name
			in = in.Field(step)
		}
	}
	in.SetString(text)
	return name
}

// TestEcho: whatever text an allocation has, errors say little of it.
func TestEcho(t *testing.T) {
	t.Parallel()
	observer := wholeA + "-observer"
	claims := map[string]*resourceapi.ResourceClaim{
		"whole":             newClaim("u1", wholeA),
		"configured":        configure(newClaim("u1", wholeA), fromClaim, gpuMPS, "r0"),
		"of the class":      configure(newClaim("u1", wholeA), fromClass, gpuMPS),
		"bad configuration": configure(newClaim("u1", wholeA), fromClaim, gpuBad, "r0"),
		"wrong kind":        configure(newClaim("u1", wholeA), fromClaim, migConfig, "r0"),
		"wrong for all":     configure(newClaim("u1", wholeA), fromClaim, migConfig),
		"two sessions":      configure(configure(newClaim("u1", wholeA, wholeB), fromClaim, gpuMPS, "r0"), fromClaim, ownMPS, "r1"),
		"partition":         configure(newClaim("u1", sliceA0), fromClaim, migMPS, "r0"),
		"overlap":           newClaim("u1", wholeA, sliceA0),
		"share":             newClaim("u1", mpsA),
		"observer":          newClaim("u1", observer),
		"admin":             admin(configure(newClaim("u1", wholeA), fromClaim, gpuMPS, "r0")),
		"no such device":    newClaim("u1", "gpu-9"),
	}
	hostile := map[string]string{
		"long": strings.Repeat("A", 9000), "escapes": "\x1b[31mred\x1b[0m\x07", "lines": "x\nE1122 forged\r\n",
		"direction": "\u202etxet\u2066", "controls": strings.Repeat("\x00\x7f\u009b", 700), "names": strings.Repeat("r0, ", 500),
		// What is allowed is said in full.
		"valid": strings.Repeat("a", 63),
	}
	ways := textsIn(reflect.TypeFor[resourceapi.DeviceAllocationResult](), nil)
	cases, refused, fields := 0, 0, map[string]int{}
	for base, claim := range claims {
		for kind, text := range hostile {
			for _, way := range ways {
				cases++
				c := claim.DeepCopy()
				name := setText(reflect.ValueOf(&c.Status.Allocation.Devices).Elem(), way, text)
				fields[name]++
				_, err := planFor(t, c)
				if err == nil {
					continue
				}
				refused++
				message := err.Error()
				if len(message) > 2000 || !utf8.ValidString(message) || strings.ContainsFunc(message, func(r rune) bool { return !unicode.IsPrint(r) }) {
					t.Errorf("%s, %s in %s: %d bytes: %.300q", base, kind, name, len(message), message)
				}
			}
		}
	}
	for _, name := range []string{".Results.Request", ".Results.Driver", ".Results.Pool", ".Results.Device", ".Results.ShareID", ".Config.Source", ".Config.Requests"} {
		expect.Same(t, fields[name], len(claims)*len(hostile), name)
	}
	t.Logf("%d cases in %d fields, %d refused", cases, len(fields), refused)
	if cases != len(ways)*len(claims)*len(hostile) || len(fields) != len(ways) || refused < cases/2 {
		t.Errorf("%d cases in %d of %d fields, %d refused", cases, len(fields), len(ways), refused)
	}
}

// TestEchoOfManyRequests: a configuration may be for all requests of a claim.
func TestEchoOfManyRequests(t *testing.T) {
	t.Parallel()
	var requests []string
	for i := range 32 {
		requests = append(requests, fmt.Sprintf("r%d/%s", i, strings.Repeat("a", 60)))
	}
	_, err := planFor(t, configure(newClaim("u1", wholeA), fromClaim, gpuBad, requests...))
	if err == nil || len(err.Error()) > 2000 || !strings.Contains(err.Error(), " more") {
		t.Errorf("%v", err)
	}
}

// pick returns one of several values.
func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

// randomClaim is allocated devices as no scheduler would: any names, shares of what is not
// shared, amounts of any size, configurations for requests that there are and are not.
func randomClaim(r *rand.Rand, devices []string) *resourceapi.ResourceClaim {
	claim := newClaim("u1")
	for i := range 1 + r.IntN(5) {
		request := fmt.Sprintf("r%d%s", i, pick(r, "", "", "", "/a", "/b"))
		one := resourceapi.DeviceRequestAllocationResult{Request: request, Driver: driverName, Pool: poolName, Device: pick(r, devices...)}
		if r.IntN(2) == 0 {
			one.ShareID = ptr.To(types.UID(pick(r, "s0", "s1", "s2")))
		}
		if r.IntN(5) == 0 {
			one.AdminAccess = ptr.To(true)
		}
		for _, name := range []resourceapi.QualifiedName{"memory", "smPercent", "shares", driverName + "/memory"} {
			if r.IntN(4) == 0 {
				if one.ConsumedCapacity == nil {
					one.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{}
				}
				one.ConsumedCapacity[name] = resource.MustParse(pick(r, "0", "1", "-1", "8Ei", "1500m", "9223372036854775807", "16Ei", "1Ki", "10Gi", "101", "1e30", "2Mi", "50"))
			}
		}
		claim.Status.Allocation.Devices.Results = append(claim.Status.Allocation.Devices.Results, one)
	}
	for range r.IntN(3) {
		var requests []string
		if r.IntN(2) == 0 {
			requests = []string{fmt.Sprintf("r%d", r.IntN(4))}
		}
		configure(claim, pick(r, fromClaim, fromClass), pick(r, gpuConfig, migConfig, gpuSlicing, gpuMPS, gpuBad, gpuLong, migMPS, ownMPS,
			"", "null", "{}", "[]", `{"apiVersion":"resource.nvidia.com/v1beta1","kind":"VfioDeviceConfig"}`), requests...)
	}
	return claim
}

// limitsIn are the limits of a record's shares.
func limitsIn(r *record.Record) (all []record.Limits) {
	for _, d := range r.Devices {
		if d.Type.IsShare() && d.Sharing != nil && (d.Sharing.Session != "" || d.Sharing.Limited) {
			all = append(all, d.Sharing.Limits)
		}
	}
	return all
}

// TestRandomAllocations: whatever stands in an allocation, a plan is refused or is one that the
// store reads again as it was, in which all limits are limits.
func TestRandomAllocations(t *testing.T) {
	inventory := testInventory(t).With(device.Status{Static: []device.Static{
		{PCIAddress: pciA, ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}, UUID: "MIG-foreign"},
	}})
	names := []string{wholeA + "-observer", "", "gpu-x", "../x"}
	for _, d := range inventory.Devices() {
		names = append(names, d.Name)
	}
	store := must.Get(record.Open(t.TempDir(), "boot-1", record.OS{}))(t)
	planned, refused, limited := 0, 0, 0
	for seed := range uint64(6000) {
		claim := randomClaim(rand.New(rand.NewPCG(seed, 0)), names)
		p, err := New(claim, Node{Driver: driverName, Pool: poolName, BootID: "boot-1", Inventory: inventory})
		if err != nil {
			refused++
			continue
		}
		planned++
		if err := store.Put(p, func(r *record.Record) error { *r = *p.Clone(); return nil }); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		read, err := store.Read("u1")
		if err != nil {
			t.Fatalf("seed %d: the record cannot be read: %v", seed, err)
		}
		if diff := cmp.Diff(p, read, cmpopts.IgnoreFields(record.Device{}, "Clients")); diff != "" { // which is not written down
			t.Fatalf("seed %d: something else is read: -written +read:\n%s", seed, diff)
		}
		for _, l := range limitsIn(p) {
			limited++
			if l.Percent < 0 || l.Percent > 100 || l.MemoryBytes < 1<<20 {
				t.Errorf("seed %d: limits that are none: %+v", seed, l)
			}
		}
	}
	if t.Logf("%d cases: %d planned, %d refused, %d limits", planned+refused, planned, refused, limited); planned < 500 || refused < 1000 || limited < 250 {
		t.Error("too few of one kind")
	}
}
