# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
gpu {
  sharing_strategy               = "mps"
  default_shared_clients_per_gpu = 4
  sharing_configuration = {
    "nvidia-tesla-t4"   = { shared_clients_per_gpu = 4 }
    "nvidia-tesla-a100" = { shared_clients_per_gpu = 8 }
  }
}
