# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
resource "castai_node_template" "one" {
  name       = "one"
  cluster_id = castai_eks_cluster.this.id

  gpu {
    sharing_strategy    = "time-slicing"
    enable_time_sharing = false
    sharing_configuration {
      gpu_name               = "T4"
      shared_clients_per_gpu = 2
    }
    sharing_configuration {
      gpu_name               = "Tesla T4"
      shared_clients_per_gpu = 3
    }
  }
}

resource "castai_node_template" "two" {
  gpu {
    enable_time_sharing = false
  }
}
