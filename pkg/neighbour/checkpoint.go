// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbour

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// CheckpointName is the file of NVIDIA's DRA driver in the folder that it and this driver share.
const CheckpointName = "checkpoint.json"

// maxCheckpoint is far more than the claims of a node need.
const maxCheckpoint = 16 << 20

// checkpoint is what NVIDIA's driver writes down, as far as it matters here. It writes all
// versions that it knows, each of which has all prepared claims; claims that it has begun to
// prepare are in the second only.
type checkpoint struct {
	V1 *checkpointClaims `json:"v1"`
	V2 *checkpointClaims `json:"v2"`
}

type checkpointClaims struct {
	PreparedClaims map[types.UID]checkpointClaim `json:"preparedClaims"`
}

// checkpointClaim is a claim as it was when it was prepared.
type checkpointClaim struct {
	Status resourceapi.ResourceClaimStatus `json:"status"`
	// Name and Namespace are missing for most claims, and in the first version.
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

// readCheckpoint returns the claims that are written down. There are none without the file.
func readCheckpoint(path string) (map[types.UID]checkpointClaim, error) {
	// Should it be a pipe, nobody waits for a writer.
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read which claims NVIDIA's DRA driver has prepared: %w", err)
	}
	defer func() { _ = file.Close() }()
	var c checkpoint
	if err := json.NewDecoder(io.LimitReader(file, maxCheckpoint)).Decode(&c); err != nil {
		return nil, fmt.Errorf("read which claims NVIDIA's DRA driver has prepared, from %s: %w", path, err)
	}
	switch {
	case c.V2 != nil:
		return c.V2.PreparedClaims, nil
	case c.V1 != nil:
		return c.V1.PreparedClaims, nil
	}
	return nil, nil
}
