// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package hook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/partage-dev/partage/pkg/node/process"
	"github.com/partage-dev/partage/pkg/util/quote"
	"github.com/partage-dev/partage/pkg/util/wait"
)

const (
	// restartTime is how long a daemon that has just ended may take to come back.
	restartTime = 2 * time.Second

	dialLimit = time.Second

	// sessionRecord is the supervisor's file in the folder of a session.
	sessionRecord = "session.json"
)

// MPSFolder is where a container has the socket of its MPS daemon: there CUDA looks by default, so that a process with an
// empty environment finds it as well.
const MPSFolder = "/tmp/nvidia-mps"

// CheckMPSClient refuses a container that would not be held to the limits of its MPS
// session, and one with a user namespace: transcripts of real nodes show that MPS fails
// there ("Mapping of buffer object failed"), though it worked on an H100 with driver 580. input is what the runtime writes to hooks;
// control is the path of the socket on the host that the container gets, which is below
// the session's folder.
func CheckMPSClient(ctx context.Context, input io.Reader, control, session string) error {
	c, err := readContainer(input)
	if err != nil {
		return fmt.Errorf("MPS session %s: %w", session, err)
	}
	if err := CheckMarkers(c.Process.Env); err != nil {
		return err
	}
	if c.hasOwnUsers() {
		return fmt.Errorf("MPS session %s: this container has a user namespace (hostUsers: false in its pod), in which CUDA programs may fail as "+
			"clients of MPS: remove hostUsers from the pod, or claim a partition, a whole GPU or a time-slice share", session)
	}
	above, name, found := strings.Cut(filepath.Clean(control), "/"+session+"/")
	if !found {
		return fmt.Errorf("MPS session %s: the socket %s is not in a folder of that name", session, control)
	}
	over, has := c.over(MPSFolder, filepath.Dir(control))
	switch {
	case over != "":
		return fmt.Errorf("MPS session %s: this container has a mount at %s that hides the socket of the MPS daemon in %s, so its programs "+
			"would run without MPS and without limits: mount the volume elsewhere", session, quote.Text(over), MPSFolder)
	case !has:
		return fmt.Errorf("MPS session %s: this container does not have the folder of the MPS daemon, %s at %s, so its programs would run without "+
			"MPS and without limits: did the container runtime apply the CDI spec of the claim?", session, filepath.Dir(control), MPSFolder)
	}
	if err := reach(ctx, filepath.Join(above, session), name); err != nil {
		return fmt.Errorf("the MPS control daemon of session %s cannot be reached at %s, so this container would run without its limits: "+
			"see the log of the mps-supervisor on this node; the container starts once the session runs again: %w", session, control, err)
	}
	return nil
}

// reach waits for a moment until the session's daemon can be reached.
func reach(ctx context.Context, folder, name string) (err error) {
	limited, cancel := context.WithTimeout(ctx, restartTime)
	defer cancel()
	check := func() (bool, error) {
		err = checkListener(ctx, folder, name)
		return err == nil, nil
	}
	if wait.Until(limited, check) != nil && ctx.Err() == nil {
		_, _ = check() // the one before may have been long ago, where the node does much else
	}
	return err
}

// daemonRecord is the part that matters of a session's record.
type daemonRecord struct {
	Daemon *process.ID `json:"daemon"`
	// Sockets are those that the daemon made, by name. Older supervisors do not record
	// them.
	Sockets map[string]process.Socket `json:"sockets"`
}

// checkListener connects to the socket and hangs up. It fails unless the recorded
// daemon listens, on the socket that it made.
func checkListener(ctx context.Context, folder, name string) error {
	path := filepath.Join(folder, sessionRecord)
	data, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the session's record: %w", err)
	}
	var record daemonRecord
	if err := json.Unmarshal(data, &record); err != nil {
		return fmt.Errorf("read the session's record %s: %w", path, err)
	}
	if record.Daemon == nil {
		return errors.New("the session has no daemon at the moment")
	}
	// A daemon that accepts no connections lets one wait when there are many.
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	socket, listener, err := process.Listener(ctx, folder, name)
	if err != nil {
		return err
	}
	if listener != *record.Daemon {
		return fmt.Errorf("%s listens, and the daemon is %s", listener, record.Daemon)
	}
	if made, ok := record.Sockets[filepath.Base(name)]; ok && made != socket {
		return fmt.Errorf("the socket has the inode %d, and the daemon made the one with inode %d", socket.Inode, made.Inode)
	}
	return nil
}
