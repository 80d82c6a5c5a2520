# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0
module "castai-eks-cluster" {
  source         = "castai/eks-cluster/castai"
  kubeconfig     = <<-EOT
    gpu { sharing_strategy = "text" }
  EOT
  node_templates = {
    default = { is_default = true }
    shared = {
      should_taint     = true
      configuration_id = module.cluster.configurations["default"] // of another module
      gpu = {
        enable_time_sharing            = true
        default_shared_clients_per_gpu = 9
        user_managed_gpu_drivers       = false
        sharing_configuration = [
          { gpu_name = "A100", shared_clients_per_gpu = 11 },
          { gpu_name = "L4", shared_clients_per_gpu = 5 },
          { gpu_name = "nvidia-a100-80gb", shared_clients_per_gpu = 16, },
          { gpu_name = "Voodoo", shared_clients_per_gpu = 2 },
        ]
      }
    }
  }
}
