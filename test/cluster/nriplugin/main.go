// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Program nriplugin is the NRI plugin of NVIDIA's container toolkit, without what else that installs on a node. It gives containers the
// CDI devices that annotations of their pods name, until it is killed.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/NVIDIA/nvidia-container-toolkit/cmd/nvidia-ctk-installer/container/runtime/nri"
	"github.com/sirupsen/logrus"
)

func main() {
	plugin := nri.NewPlugin(context.Background(), logrus.StandardLogger(), []string{"gpu-operator"})
	if err := plugin.Start(context.Background(), "", "10"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println("the plugin runs")
	select {}
}
