// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package supervisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/partage-dev/partage/pkg/mps"
	"github.com/partage-dev/partage/pkg/wait"
)

const (
	// failuresToFail is how many failures in a row make a session Failed.
	failuresToFail = 3
	// intervalsToFail is after how many check intervals without an answer a session
	// is Failed…
	intervalsToFail = 3
	// …and intervalsToReplace after how many its daemon is replaced, if no client
	// would notice.
	intervalsToReplace = 15
)

// errDelayed: the next start is put off.
var errDelayed = errors.New("it has failed too often to be restarted at once")

// repairer keeps a session running that ran before. The session's lock guards it.
type repairer struct {
	daemon  *daemon
	backoff backoff
	// silentSince is when the daemon stopped answering, faultySince when its server
	// stopped accepting clients.
	silentSince, faultySince time.Time
}

// repair makes the session run as the spec says: it checks what runs, and restarts
// what ended. Without an error the session is running or faulted.
func (r *repairer) repair(ctx context.Context, spec mps.Spec) error {
	d := r.daemon
	if err := d.adopt(ctx); err != nil {
		return err
	}
	if !d.process.Ended() {
		err := wait.Until(ctx, func() (bool, error) {
			err := r.check(ctx)
			return d.status.get().Phase != mps.Starting, err
		})
		if endedMeanwhile := d.process.Ended() && d.record.Daemon != nil; !endedMeanwhile {
			return r.finish(ctx, spec, err)
		}
	}
	r.recordDaemonEnd(ctx)
	if r.backoff.delay() > 0 {
		return errDelayed
	}
	return r.restart(ctx, spec)
}

// finish changes the limits of a session that was found running. err is what
// checking it returned.
func (r *repairer) finish(ctx context.Context, spec mps.Spec, err error) error {
	d := r.daemon
	if errors.Is(err, errTooSlow) && d.status.get().Phase == mps.Starting {
		// A server that never becomes ready has no clients.
		err = errors.Join(err, d.stop(context.WithoutCancel(ctx)))
		d.recordLoss(ctx, "the control daemon did not notice that its server had ended")
		r.publishFailure(err)
	}
	if err == nil && d.record.Spec.OnClientKilled != spec.OnClientKilled {
		d.record.Spec.OnClientKilled = spec.OnClientKilled
		err = d.folder.save(d.record)
	}
	if err != nil || d.status.get().Phase != mps.Running || d.record.Spec.SameLimits(spec) {
		return err
	}
	return d.changeLimits(ctx, spec)
}

// restart starts daemon and server of a session that ran before. If that fails the
// session keeps its spec.
func (r *repairer) restart(ctx context.Context, spec mps.Spec) error {
	d := r.daemon
	r.silentSince, r.faultySince = time.Time{}, time.Time{}
	old := d.record.Spec
	d.record.Spec = spec
	err := d.start(ctx)
	if err == nil {
		klog.FromContext(ctx).Info("MPS session runs again", "daemon", d.process.PID, "losses", d.record.Losses)
		return nil
	}
	d.record.Spec = old
	if saveErr := d.folder.save(d.record); saveErr != nil {
		err = errors.Join(err, saveErr)
	}
	r.publishFailure(err)
	return err
}

// replaceDaemon stops a daemon that is of no more use, and starts another.
func (r *repairer) replaceDaemon(ctx context.Context, cause error) error {
	d := r.daemon
	klog.FromContext(ctx).Error(cause, "Replacing the MPS control daemon", "pid", d.process.PID)
	if err := d.stop(ctx); err != nil {
		r.publishFailure(err)
		return errors.Join(cause, err)
	}
	d.recordLoss(ctx, cause.Error())
	r.backoff.ended(d.readySince)
	return r.restart(ctx, d.record.Spec)
}

func (r *repairer) publishFailure(err error) {
	r.backoff.failed()
	phase := mps.Starting
	if r.backoff.failures >= failuresToFail {
		phase = mps.Failed
	}
	r.daemon.publish(phase, err.Error())
}

// recordDaemonEnd records the loss that the end of the daemon was, once.
func (r *repairer) recordDaemonEnd(ctx context.Context) {
	d := r.daemon
	if d.record.Daemon == nil {
		return
	}
	how := "it ended together with the supervisor, or while there was none"
	if d.process != nil {
		how = d.process.How()
	}
	text := fmt.Sprintf("the control daemon (%s) ended: %s", d.record.Daemon, how)
	d.recordLoss(ctx, text)
	d.process, d.record.Daemon, d.record.Sockets = nil, nil, nil
	r.backoff.ended(d.readySince)
	if err := d.folder.save(d.record); err != nil {
		klog.FromContext(ctx).Error(err, "MPS loss cannot be recorded")
	}
	d.publish(mps.Starting, text)
}
