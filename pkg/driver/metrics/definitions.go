// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package metrics

import "github.com/prometheus/client_golang/prometheus"

// Definition is what docs/reference/metrics.md says of a metric.
type Definition struct {
	Name   string
	Type   Type
	Labels []string
	// Help says what it means, in one line.
	Help string
}

// Type is Prometheus's.
type Type string

// The types.
const (
	Counter   Type = "counter"
	Gauge     Type = "gauge"
	Histogram Type = "histogram"
)

// Group is a section of docs/reference/metrics.md.
type Group struct {
	Title string
	// Text introduces the metrics.
	Text        string
	Definitions []Definition
}

func (d Definition) desc() *prometheus.Desc {
	return prometheus.NewDesc(d.Name, d.Help, d.Labels, nil)
}

// Labels of metrics about claims.
var claimLabels = []string{"namespace", "resourceclaim_name", "device", "uuid", "kind", "profile"}

func ofClaim(name, help string, more ...string) Definition {
	return Definition{"partage_claim_" + name, Gauge, append(append([]string{}, claimLabels...), more...), help}
}

func ofGPU(name, help string, more ...string) Definition {
	return Definition{"partage_gpu_" + name, Gauge, append([]string{"gpu"}, more...), help}
}

// Metrics of calls of the kubelet.
var (
	prepareDuration = Definition{"partage_prepare_duration_seconds", Histogram, []string{"result"},
		"How long it took to prepare a claim, waiting included, by result: success or failure."}
	unprepareDuration = Definition{"partage_unprepare_duration_seconds", Histogram, []string{"result"},
		"How long it took to release a claim, waiting included, by result: success or failure."}
	stepDuration = Definition{"partage_claim_step_duration_seconds", Histogram, []string{"operation", "step"},
		"How long a step of preparing or releasing a claim took: wait, nvml, cdi, journal or mps. Work on several GPUs at the same time adds up."}
	prepareFailures = Definition{"partage_prepare_failures_total", Counter, []string{"reason"},
		"Claims that could not be prepared, by reason."}
	unprepareFailures = Definition{"partage_unprepare_failures_total", Counter, []string{"reason"},
		"Claims that could not be released, by reason."}
)

// Metrics of the driver.
var (
	buildInfo = Definition{"partage_build_info", Gauge, []string{"version", "goversion"},
		"1, with the version of the driver."}
	reconcileErrors = Definition{"partage_reconcile_errors_total", Counter, nil,
		"Rounds of cleaning up that left something undone."}
	publishErrors = Definition{"partage_publish_errors_total", Counter, nil,
		"Attempts to publish ResourceSlices that failed."}
	eventErrors = Definition{"partage_event_errors_total", Counter, nil,
		"Attempts to write an Event that failed, for example because an admission policy refuses it: people may not read of what has happened."}
	publishedSlices = Definition{"partage_published_slices", Gauge, nil,
		"ResourceSlices of this node that were in the API server as they should be when that was last known; 0 before, and while another instance on the node sees to them."}
	journalRecords = Definition{"partage_journal_records", Gauge, []string{"state"},
		"Claims on record by state: preparing, prepared, releasing, earlier (of another boot) or unreadable."}
	neighbours = Definition{"partage_neighbour", Gauge, []string{"kind"},
		"1 while something else on the node gives out or partitions its GPUs, otherwise 0: device-plugin, dra-driver (NVIDIA's, with the same name), mig-manager or container-runtime (NVIDIA's gives GPUs to containers without a claim). Absent while not known."}
	extendedResources = Definition{"partage_extended_resources", Gauge, nil,
		"1 while pods can have devices of this node by an extended resource such as nvidia.com/gpu, 0 while the kubelet is too old for that. Absent while its version is not known."}
	mpsServers = Definition{"partage_mps_servers", Gauge, []string{"state"},
		"MPS servers by state: starting, running, faulted or failed. Absent while no supervisor answers."}
)

// Metrics of GPUs.
var (
	gpuInfo    = ofGPU("info", "1, with what the GPU is.", "uuid", "product", "architecture", "driver_version")
	gpuHealthy = ofGPU("healthy",
		"1 while the GPU works; 0 while a fault of the whole GPU keeps pods away or evicts them. A cordoned GPU works.")
	gpuCondition = ofGPU("condition",
		"1 while the condition holds on the GPU or on a part of it. The reason is that of the taint, the effect what the taint does.", "reason", "effect")
	gpuXIDs = Definition{"partage_gpu_xid_errors_total", Counter, []string{"gpu", "xid"},
		"XID errors that the driver reported since this process started. Serious ones are there with 0 before the first."}
	gpuRole = ofGPU("role",
		"1 for the role that the GPU has: free, whole, partitioned, mps, timeslice or unavailable.", "role")
	gpuMemory            = ofGPU("memory_bytes", "Memory that the GPU has.")
	gpuMemoryAllocatable = ofGPU("memory_allocatable_bytes",
		"Memory that claims can have at the same time, at most: that of the largest legal choice of published devices, never the sum of devices that exclude each other.")
	gpuMemoryAllocated = ofGPU("memory_allocated_bytes",
		"Memory that prepared claims have: whole devices, and what was reserved for shares. Never more than the GPU has, also with overcommitment.")
	gpuMemoryUsed         = ofGPU("memory_used_bytes", "Memory that programs use, without what the driver reserves for itself.")
	gpuMemoryUnattributed = ofGPU("memory_unattributed_bytes",
		"Used memory that cannot be said to be a claim's: of MPS servers, of processes outside of pods, or of pods with two claims to the same device.")
	gpuUtilization = ofGPU("utilization_ratio", "Part of the time in which a kernel ran, 0 to 1. Absent while MIG mode is on.")
	gpuThrottled   = ofGPU("throttled", "1 while the GPU's clocks are lowered for a reason that means that something is wrong, otherwise 0.", "reason")
	gpuTemperature = ofGPU("temperature_celsius", "Temperature of the GPU's chip.")
	gpuPower       = ofGPU("power_watts", "Power that the board draws: from Ampere on, except for A100 and A30, the average of a second. Absent where the board does not report it.")
	gpuNVLinkSent  = Definition{"partage_gpu_nvlink_tx_bytes_total", Counter, []string{"gpu"},
		"Bytes that the GPU has sent over all of its NVLinks since the driver was loaded. Absent without NVLink, and while MIG mode is on."}
	gpuNVLinkReceived = Definition{"partage_gpu_nvlink_rx_bytes_total", Counter, []string{"gpu"},
		"Bytes that the GPU has received over all of its NVLinks since the driver was loaded. Absent without NVLink, and while MIG mode is on."}
	gpuPCIeSent = ofGPU("pcie_tx_bytes_per_second",
		"Bytes that the GPU sent over PCIe in 20 ms before the sample, for a second. Absent where the GPU does not report it, and while a claim's work on it goes first.")
	gpuPCIeReceived = ofGPU("pcie_rx_bytes_per_second",
		"Bytes that the GPU received over PCIe in 20 ms before the sample, for a second. Absent like what it sent.")
	gpuSampled = ofGPU("sample_timestamp_seconds",
		"When it was last read what is used of the GPU. It stands still while the GPU does not answer; what was read is not told any more after a minute or four intervals.")
	gpuMemorySlice = ofGPU("memory_slice",
		"1 for a memory slice that a claim or somebody else's partition has, 0 for a free one. A GPU without MIG counts as one slice. A slice of a shared device has the device and no claim.",
		"slice", "namespace", "resourceclaim_name", "device")
	devices = Definition{"partage_devices", Gauge, []string{"gpu", "kind", "profile", "state"},
		"Published devices by kind, MIG profile (empty for whole GPUs and their shares) and state: allocated (a prepared claim has it), blocked (by an allocated one), tainted, or free."}
)

// Metrics of claims.
var (
	claimInfo = ofClaim("info",
		"1 for each device of each prepared claim. The pod is empty where it is not known, or where there are several; the GPU instance where there is none.",
		"pod", "gpu", "gpu_uuid", "gpu_instance", "resourceclaim_uid")
	claimPod = Definition{"partage_claim_pod_info", Gauge, []string{"namespace", "resourceclaim_name", "pod"},
		"1 for each pod that a prepared claim is reserved for."}
	claimMemoryUsed = ofClaim("memory_used_bytes",
		"Memory that the claim's processes use, with their contexts. For a device that the claim has alone, all that is used of it.")
	claimMemoryPeak = ofClaim("memory_peak_bytes",
		"The most memory that any sample had, since the claim was prepared or this process started.")
	claimMemoryLimit = ofClaim("memory_limit_bytes",
		"Memory that the claim can have at most: the device's, or the limit of the share, which MPS applies to each process. Absent without a limit.")
	claimMemoryRequested = ofClaim("memory_requested_bytes",
		"Memory that the scheduler reserved for the claim. Absent for a share without a request, and while it is not known.")
	claimUtilization = ofClaim("sm_utilization_ratio",
		"Part of the time in which the claim's kernels ran, 0 to 1. Absent where the GPU does not report it, as for shares of partitions, and for partitions before Hopper.")
	claimProcesses = ofClaim("processes",
		"Processes with a context on the claim's device. For one that the claim has alone its MPS server counts, too.")
	claimThrottled = ofClaim("throttled", "1 while the claim's GPU is throttled for a reason that means that something is wrong, otherwise 0.")
	claimIdle      = ofClaim("idle_seconds",
		"For how long no sample had the claim at work: its utilization was zero, or, where that is not known, it had no process. Since the claim was prepared or this process started.")
)

// Metrics with the names and labels of NVIDIA's own DRA driver.
var (
	draRequests = Definition{"nvidia_dra_requests_total", Counter, []string{"driver", "operation"},
		"Claims that were prepared or released, or could not be."}
	draDuration = Definition{"nvidia_dra_request_duration_seconds", Histogram, []string{"driver", "operation"},
		"How long that took, failures and waiting included."}
	draInflight = Definition{"nvidia_dra_requests_inflight", Gauge, []string{"driver", "operation"},
		"Claims that are being prepared or released, those included that wait."}
	draPrepared = Definition{"nvidia_dra_prepared_devices", Gauge, []string{"node", "driver", "device_type"},
		"Devices of prepared claims by kind: gpu, mig, mps or timeslice."}
	draPrepareErrors = Definition{"nvidia_dra_node_prepare_errors_total", Counter, []string{"driver", "error_type"},
		"The same as partage_prepare_failures_total."}
	draUnprepareErrors = Definition{"nvidia_dra_node_unprepare_errors_total", Counter, []string{"driver", "error_type"},
		"The same as partage_unprepare_failures_total."}
)

// Metrics that are computed from the state of the driver at each scrape, in the order of the reference.
var (
	claimMetrics = []Definition{
		claimInfo, claimPod, claimMemoryUsed, claimMemoryPeak, claimMemoryLimit, claimMemoryRequested,
		claimUtilization, claimProcesses, claimThrottled, claimIdle,
	}
	gpuMetrics = []Definition{
		gpuInfo, gpuHealthy, gpuCondition, gpuXIDs, gpuRole, gpuMemory, gpuMemoryAllocatable, gpuMemoryAllocated, gpuMemoryUsed,
		gpuMemoryUnattributed, gpuUtilization, gpuThrottled, gpuTemperature, gpuPower, gpuNVLinkSent, gpuNVLinkReceived,
		gpuPCIeSent, gpuPCIeReceived, gpuSampled, gpuMemorySlice, devices,
	}
)

// Reference has all metrics of the driver, without those of the process.
func Reference() []Group {
	return []Group{
		{"Claims", "One series for each device of each prepared claim, as long as it is prepared. `kind` is how the claim has the " +
			"device: `gpu`, `mig`, `mps` or `timeslice`; `profile` is that of the partition, or empty; `uuid` is that of the GPU or of the partition.",
			claimMetrics},
		{"GPUs", "`gpu` is the PCI address.", gpuMetrics},
		{"Preparing and releasing", "Histograms count from a millisecond to a minute.",
			[]Definition{prepareDuration, unprepareDuration, stepDuration, prepareFailures, unprepareFailures}},
		{"The driver", "",
			[]Definition{buildInfo, reconcileErrors, publishErrors, eventErrors, publishedSlices, journalRecords, mpsServers, neighbours, extendedResources}},
		{"With the names of NVIDIA's driver", "For dashboards and alerts that exist; names, labels and buckets are the same. The chart's value `metrics.nvidiaDRA.port: 8080` has these six, " +
			"and no others, on the port of NVIDIA's driver too, at the path `metrics.nvidiaDRA.path`. NVIDIA's driver measures only what succeeds, and counts as in progress only what no longer waits.",
			[]Definition{draRequests, draDuration, draInflight, draPrepared, draPrepareErrors, draUnprepareErrors}},
	}
}
