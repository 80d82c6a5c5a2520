// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/partage-dev/partage/pkg/driver/claim"
)

// TestMetadataAttributes: what containers can read about a share.
func TestMetadataAttributes(t *testing.T) {
	t.Parallel()
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	number := func(n int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &n} }
	want := map[string]resourceapi.DeviceAttribute{
		"driverVersion": {VersionValue: ptr.To("580.95.5")}, "uuid": text("GPU-" + firstGPU),
		"memoryBytes": number(2 << 30), "multiprocessors": number(4), "smPercent": number(30), "mpsSession": text("gpu-0000-1b-00-0"),
		"resource.kubernetes.io/pciBusID": text(firstGPU),
	}
	if diff := cmp.Diff(want, metadataAttributes(&liveShare)); diff != "" {
		t.Errorf("share (-want +got):\n%s", diff)
	}
	want = map[string]resourceapi.DeviceAttribute{
		"uuid": text("MIG-7"), "memoryBytes": number(4 << 30), "multiprocessors": number(8),
		"gpuInstanceID": number(3), "computeInstanceID": number(0), "placementStart": number(1), "placementSize": number(1),
		"resource.kubernetes.io/pciBusID": text(firstGPU),
	}
	if diff := cmp.Diff(want, metadataAttributes(&liveSlice)); diff != "" {
		t.Errorf("partition (-want +got):\n%s", diff)
	}
	if *liveShare.Attributes["uuid"].StringValue != "GPU-x" {
		t.Error("the published attributes have changed")
	}
}

// TestMetadataFiles: a prepared claim has a file with its devices, which goes with the claim;
// without the option there is none.
func TestMetadataFiles(t *testing.T) {
	t.Parallel()
	for _, enabled := range []bool{true, false} {
		r := newRig(t)
		r.options.DeviceMetadata = enabled
		r.start(t)
		client := r.register(t)
		asked := r.claim("c")
		shared := liveShare
		shared.Device, shared.ShareID = "gpu-0000-1b-00-0", ptr.To(types.UID("share")) // as the fake prepares it
		r.claims.setLive(claim.LiveClaim{Claim: claim.Ref{Namespace: "default", Name: "c", UID: types.UID(asked.GetUid())}, Devices: []claim.LiveDevice{shared}})
		ids := r.prepared(t, client, asked)
		file := filepath.Join(r.options.DataDir, "dra-device-metadata", "default_c", "r", "metadata.json")
		if !enabled {
			if _, err := os.Stat(file); !errors.Is(err, os.ErrNotExist) || len(ids) != 1 {
				t.Errorf("without the option: %v, CDI ids %v", err, ids)
			}
			continue
		}
		content, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		text, _ := io.ReadAll(content)
		_ = content.Close()
		for _, part := range []string{`"metadata.resource.k8s.io/v1beta1"`, `"uuid"`, "GPU-" + firstGPU, `"multiprocessors"`} {
			if !strings.Contains(string(text), part) {
				t.Errorf("the file lacks %s: %s", part, text)
			}
		}
		if len(ids) != 2 || ids[1] != "gpu.nvidia.com/metadata="+asked.GetUid()+"_r" {
			t.Errorf("CDI ids %v", ids)
		}
		// As who is killed while it writes the CDI spec again leaves it.
		half := filepath.Join(r.options.CDIDir, ".gpu.nvidia.com_metadata_"+asked.GetUid()+"_r.json.tmp")
		if err := os.WriteFile(half, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		r.unprepared(t, client, asked)
		for _, folder := range []string{r.options.CDIDir, filepath.Join(r.options.DataDir, "dra-device-metadata")} {
			if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
				t.Errorf("left in %s: %v, %v", folder, left, err)
			}
		}
	}
}

// TestMetadataContext: what containers read has the SELinux context, and CDI specs have none.
func TestMetadataContext(t *testing.T) {
	const context = "system_u:object_r:container_file_t:s0"
	dir := t.TempDir()
	file, spec := filepath.Join(dir, "metadata.json"), filepath.Join(dir, "cdi", "spec.json")
	if err := os.Mkdir(filepath.Dir(spec), 0o700); err != nil {
		t.Fatal(err)
	}
	write := (&Options{CDIDir: filepath.Dir(spec) + "/", FileContext: context}).metadataWriter()
	if err := write(file, nil, 0o644); errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOTSUP) {
		t.Skipf("files cannot have a context here: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
	if err := write(spec, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{file: context + "\x00", spec: ""} {
		value := make([]byte, 100)
		n, _ := unix.Getxattr(path, "security.selinux", value)
		if got := string(value[:max(n, 0)]); got != want {
			t.Errorf("%s has the context %q, want %q", path, got, want)
		}
	}
}
