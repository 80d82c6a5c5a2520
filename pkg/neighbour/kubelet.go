// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package neighbour

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

const (
	// kubeletTimeout bounds one question. The kubelet answers from memory.
	kubeletTimeout = 5 * time.Second
	// maxPodResources is the limit of the kubelet's own client.
	maxPodResources = 16 << 20
)

// ErrKubelet says that the kubelet has given no answer, and may soon give one.
var ErrKubelet = errors.New("ask the kubelet which devices pods have")

// Kubelet asks the kubelet's PodResources API.
type Kubelet struct {
	// Socket is the kubelet's, pod-resources/kubelet.sock in its folder.
	Socket string
	// PodName is the name of this process's pod. A list without it was made before the kubelet
	// knew its pods. Optional.
	PodName string
}

// pods lists the pods that run on the node, with what each container has.
func (k *Kubelet) pods(ctx context.Context) (pods []*podresourcesapi.PodResources, err error) {
	if _, err := os.Stat(k.Socket); errors.Is(err, fs.ErrNotExist) {
		// It would be there if this kubelet had one in this folder.
		return nil, fmt.Errorf("the kubelet cannot be asked which devices pods have: no %s", k.Socket)
	}
	ctx, cancel := context.WithTimeout(ctx, kubeletTimeout)
	defer cancel()
	// A new connection each time, so that a kubelet that restarts is not waited for.
	conn, err := grpc.NewClient("unix://"+k.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxPodResources)))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKubelet, err)
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	answer, err := podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
	if err != nil {
		return nil, fmt.Errorf("%w: %s", ErrKubelet, status.Convert(err).Message())
	}
	known := func(p *podresourcesapi.PodResources) bool { return k.PodName == "" || p.GetName() == k.PodName }
	if !slices.ContainsFunc(answer.GetPodResources(), known) {
		return nil, fmt.Errorf("%w: it has not read its pods yet", ErrKubelet)
	}
	return answer.GetPodResources(), nil
}
