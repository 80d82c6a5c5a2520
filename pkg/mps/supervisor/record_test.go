// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/mps/supervisor/rules"
	"github.com/partage-dev/partage/pkg/node/process"
)

// The supervisor of one version adopts the sessions of another: the form of the record
// must stay.
func TestRecordFormat(t *testing.T) {
	const text = `{
  "apiVersion": "mps.partage.dev/v1",
  "bootID": "6f1c9c0e-0000-4000-8000-000000000001",
  "spec": {
    "id": "gpu-0",
    "devices": [
      "GPU-aaaaaaaa-0000-0000-0000-000000000001"
    ],
    "threadPercentage": 25,
    "memory": {
      "GPU-aaaaaaaa-0000-0000-0000-000000000001": 1073741824
    },
    "multiUser": true
  },
  "started": true,
  "removing": true,
  "serving": true,
  "daemon": {
    "pid": 4711,
    "start": 815
  },
  "servers": [
    {
      "pid": 4712,
      "start": 816
    }
  ],
  "sockets": {
    "control": {
      "device": 60,
      "inode": 5
    }
  },
  "serverUser": "0",
  "losses": 2,
  "lastLoss": "the server (PID 4700) ended",
  "lastLossTime": "2026-11-01T12:00:00Z"
}
`
	want := rules.Record{
		APIVersion: recordVersion, BootID: "6f1c9c0e-0000-4000-8000-000000000001",
		Spec:    mps.Spec{ID: "gpu-0", Devices: []string{gpuA}, ThreadPercentage: 25, Memory: map[string]int64{gpuA: 1 << 30}, MultiUser: true},
		Started: true, Removing: true, Serving: true,
		Daemon: &process.ID{PID: 4711, Start: 815}, Servers: []process.ID{{PID: 4712, Start: 816}}, ServerUser: "0",
		Sockets: map[string]process.Socket{"control": {Device: 60, Inode: 5}},
		History: mps.History{Losses: 2, LastLoss: "the server (PID 4700) ended", LastLossTime: time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)},
	}
	f := folder(filepath.Join(t.TempDir(), "gpu-0"))
	if err := os.Mkdir(string(f), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := f.save(want); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(f.record()); err != nil || cmp.Diff(text, string(data)) != "" {
		t.Errorf("%v, -want +got:\n%s", err, cmp.Diff(text, string(data)))
	}
	if got, err := f.load(); err != nil || cmp.Diff(want, got) != "" {
		t.Errorf("%v, -want +got:\n%s", err, cmp.Diff(want, got))
	}
}
