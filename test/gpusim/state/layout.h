// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The shared state file: one header and two copies ("slots") of the machine.
// Package machine explains the fields; the names here follow it.
//
// Everything has a fixed size, so that the file can be mapped and copied as a
// whole, and holds no pointers, so that it means the same in every process.

#ifndef GPUSIM_LAYOUT_H
#define GPUSIM_LAYOUT_H

#include <stdatomic.h>
#include <stdint.h>

#define GS_MAGIC "GPUSIM\n"
// Raise it at every change of the structures below.
#define GS_LAYOUT_VERSION 14

enum {
	GS_MAX_GPUS = 16,
	GS_MAX_NICS = 16,
	GS_MAX_NVLINKS = 18,
	GS_MAX_PROFILES = 32,
	GS_MAX_PLACEMENTS = 16,
	GS_MAX_INSTANCE_IDS = 16,
	GS_MAX_CI_PROFILES = 12,
	GS_MAX_INSTANCES = 16,
	GS_MAX_COMPUTE = 8,
	// GPUs have up to 60 MPS clients each.
	GS_MAX_PROCESSES = 512,
	GS_MAX_FAULTS = 32,
	GS_MAX_LATENCIES = 48,
	// That are kept for those who wait for them.
	GS_MAX_EVENTS = 64,
	// More than there are faults at a time: see gs_fault.
	GS_FAULT_COUNTS = 256,
	// Calls that faults hold at a time.
	GS_MAX_HELD = 128,
	// More than nvml.h has functions.
	GS_MAX_COUNTERS = 1024,
	GS_MAX_MEMORY_LIMITS = 64,
	GS_NAME = 64,
	GS_LONG_NAME = 96,
	// More than a folder can have that holds a socket.
	GS_PIPE = 112,
	GS_CGROUP = 256,
};

struct gs_placement {
	int32_t start;
	int32_t size;
};

struct gs_ci_profile {
	int32_t enumeration;
	uint32_t id;
	int32_t slices;
	int32_t max_instances;
	int32_t sms;
};

struct gs_profile {
	char name[GS_NAME];
	int32_t enumeration;
	uint32_t id;
	int32_t slices;
	int32_t max_instances;
	int32_t sms;
	int32_t copy_engines;
	int32_t decoders;
	int32_t encoders;
	int32_t jpeg;
	int32_t ofa;
	uint64_t memory_mib;
	int32_t placement_count;
	int32_t instance_id_count;
	int32_t ci_profile_count;
	int32_t reserved_mib;
	struct gs_placement placements[GS_MAX_PLACEMENTS];
	int32_t instance_ids[GS_MAX_INSTANCE_IDS];
	struct gs_ci_profile ci_profiles[GS_MAX_CI_PROFILES];
};

// A serial is given once and never again. It distinguishes an instance from a later
// one with the same id, so that old handles are recognised.
struct gs_compute {
	uint64_t serial;
	int32_t id;
	uint32_t profile_id;
	struct gs_placement placement;
	int32_t compute_mode;
	int32_t unused;
	char uuid[GS_NAME];
};

struct gs_instance {
	uint64_t serial;
	int32_t id;
	uint32_t profile_id;
	struct gs_placement placement;
	int32_t compute_count;
	int32_t unused;
	struct gs_compute compute[GS_MAX_COMPUTE];
};

// What a GPU says about its own state: machine.Health.
struct gs_health {
	uint64_t volatile_corrected;
	uint64_t volatile_uncorrected;
	uint64_t aggregate_corrected;
	uint64_t aggregate_uncorrected;
	uint64_t clocks_reasons;
	int32_t remapped_corrected;
	int32_t remapped_uncorrected;
	int32_t remap_pending;
	int32_t remap_failed;
	int32_t channel_repair;
	int32_t tpc_repair;
	int32_t unrepairable;
	int32_t recovery_action;
	int32_t temperature;
	int32_t fabric_state;
	int32_t fabric_status;
	uint32_t fabric_mask;
	int32_t retired_pending;
	int32_t unused;
};

// machine.Meters
struct gs_meters {
	uint64_t nvlink_tx_kib;
	uint64_t nvlink_rx_kib;
	int32_t milliwatts;
	int32_t pcie_tx_kb;
	int32_t pcie_rx_kb;
	int32_t unused;
};

// machine.NVLink
struct gs_nvlink {
	char remote[GS_NAME];
	int32_t remote_type;
	int32_t down;
};

// machine.NIC
struct gs_nic {
	char pci_address[GS_NAME];
	char pcie_root[GS_NAME];
	char pcie_switch[GS_NAME];
	uint32_t pci_device_id;
	int32_t numa_node;
};

struct gs_gpu {
	char board[GS_NAME];
	char uuid[GS_NAME];
	char serial[GS_NAME];
	char product_name[GS_LONG_NAME];
	char pci_address[GS_NAME];
	char pcie_root[GS_NAME];
	char pcie_switch[GS_NAME];
	char cluster_uuid[GS_NAME];
	int32_t clique_id;
	int32_t nvlink_count;
	int32_t brand;
	int32_t architecture;
	int32_t compute_major;
	int32_t compute_minor;
	int32_t minor;
	uint32_t pci_device_id;
	uint32_t pci_subsystem;
	int32_t numa_node;
	uint64_t memory_bytes;
	uint64_t reserved_bytes;
	uint64_t context_bytes;
	uint64_t mps_server_bytes;
	uint64_t mig_context_bytes;
	int32_t cores;
	int32_t addressing_mode;
	int32_t ecc;
	int32_t compute_mode;
	int32_t time_slice;
	int32_t persistence;
	int32_t no_events;
	int32_t resets; // so that handles from before one are recognised
	struct gs_health health;
	struct gs_meters meters;

	int32_t mig_capable;
	int32_t mig_current;
	int32_t mig_pending;
	int32_t reset_to_switch;
	int32_t memory_slices;
	int32_t profile_count;
	int32_t instance_count;
	int32_t failure;
	struct gs_nvlink nvlinks[GS_MAX_NVLINKS];
	struct gs_profile profiles[GS_MAX_PROFILES];
	struct gs_instance instances[GS_MAX_INSTANCES];
};

// An entry with an owner is there as long as the process that keeps it: see
// gs_own. One without stays until it is removed.
struct gs_process {
	char name[GS_LONG_NAME];
	char pipe[GS_PIPE]; // MPS: the folder of its control daemon
	uint64_t owner;
	uint64_t memory_bytes;
	int32_t pid;
	int32_t gpu;
	int32_t instance_id;
	int32_t compute_id;
	int32_t kind;   // machine.ProcessKind
	int32_t status; // machine.MPSStatus
	int32_t fault;  // the MPS server is to have a fault
	int32_t sm;     // percentage of the multiprocessors that is busy
};

// machine.ProcessKind
enum gs_kind { GS_COMPUTE, GS_MPS_SERVER, GS_MPS_CLIENT, GS_HANDLE, GS_KINDS };

// What becomes of a call that a fault strikes: machine.Effect.
enum gs_effect {
	GS_FAIL,
	GS_FAIL_AFTER,
	GS_PRETEND,
	GS_KILL_BEFORE,
	GS_KILL_AFTER,
	GS_PROCEED,
	GS_EFFECTS,
};

// The serial distinguishes a fault from a later one with the same id. The calls are
// counted in fault_counts[serial % GS_FAULT_COUNTS] of the file; live faults
// never share one, and a place that becomes free rests for long, so that a slow
// caller does not add to the count of another fault.
struct gs_fault {
	uint64_t serial;
	char function[GS_LONG_NAME]; // "*": all
	int32_t id;
	int32_t gpu; // -1: any, and none
	int32_t skip;
	int32_t times; // 0: no limit
	int32_t effect;
	int32_t code;
	int32_t hang;
	int32_t all_gpus;
	int64_t delay; // nanoseconds
	double probability;
};

// The event with a number is events[number % GS_MAX_EVENTS] of the machine until as many
// others have happened.
struct gs_event {
	uint64_t type; // nvmlEventType
	uint64_t data; // the XID
	int32_t gpu;
	int32_t instance_id; // -1: the whole GPU
	int32_t compute_id;  // -1: the whole GPU instance
	int32_t unused;
};

// How much of a GPU's memory the processes of a cgroup can have. It ends with the cgroup,
// whose inode is given once and never again.
struct gs_memory_limit {
	char cgroup[GS_CGROUP]; // its path, for whoever set the limit
	uint64_t inode;		// 0: no limit
	uint64_t soft;
	uint64_t hard;
	int32_t gpu;
	int32_t unused;
};

struct gs_latency {
	char function[GS_LONG_NAME];
	int64_t base; // nanoseconds
	int64_t per_instance;
	int32_t exclusive;
	int32_t unused;
};

// The GPUs come last: a copy may stop after the last one in use.
struct gs_machine {
	char name[GS_NAME];
	char driver_version[GS_NAME];
	char nvml_version[GS_NAME];
	char boot_id[GS_NAME];
	int32_t cuda_driver_version;
	int32_t gpu_count;
	int32_t process_count;
	int32_t fault_count;
	int32_t latency_count;
	int32_t failing; // how many GPUs have a failure
	// machine.MPS
	int32_t mps_harmless_kills;
	int32_t mps_named_shared_memory;
	int32_t mps_few_files;
	int32_t moving_minors;
	int32_t mps_no_priorities;
	int32_t mps_control_needs_shared_memory;
	int32_t nic_count;
	int32_t coherent_memory; // machine.CoherentMemory
	int32_t unused;
	uint64_t next_serial;
	uint64_t next_fault;
	uint64_t next_event; // the number that the next event gets
	struct gs_event events[GS_MAX_EVENTS];
	struct gs_process processes[GS_MAX_PROCESSES];
	struct gs_fault faults[GS_MAX_FAULTS];
	struct gs_latency latencies[GS_MAX_LATENCIES];
	struct gs_nic nics[GS_MAX_NICS];
	struct gs_memory_limit memory_limits[GS_MAX_MEMORY_LIMITS];
	struct gs_gpu gpus[GS_MAX_GPUS];
};

// machine.CoherentMemory
enum gs_coherent_memory { GS_COHERENT_DEFAULT, GS_COHERENT_NUMA, GS_COHERENT_DRIVER };

enum gs_counter_state { GS_COUNTER_FREE, GS_COUNTER_TAKEN, GS_COUNTER_NAMED };

// Calls of one function. The name is there once the state says so; then it
// stays. Two processes that count a function for the first time at once may
// make two counters of it: readers add them up.
struct gs_counter {
	_Atomic uint32_t state;
	_Atomic uint32_t unmodelled; // the library answered "not supported"
	_Atomic uint64_t calls;
	char name[GS_LONG_NAME];
};

struct gs_fault_count {
	_Atomic uint64_t seen;
	_Atomic uint64_t struck;
};

// A call that a fault holds: see gs_wait_at_gate. The owner comes first and the ticket,
// which no other call gets, last: without one there is no call.
struct gs_held {
	_Atomic uint64_t owner; // as gs_process.owner; 0: free
	_Atomic uint64_t ticket;
	_Atomic uint64_t may_go; // the ticket of the call that is held no longer
	uint64_t fault;		 // its serial
	uint32_t gpus;		 // a bit for each GPU that the call is on
	int32_t pid;
	int32_t behind; // it waits for one that holds all GPUs
	int32_t unused;
	char function[GS_LONG_NAME];
};

struct gs_file {
	char magic[8];
	uint32_t layout_version;
	uint32_t unused;
	uint64_t size;
	// The slot that counts is slot[generation % 2]. A commit fills the other
	// one and then raises the generation: one store, so a writer that dies
	// leaves either the old machine or the new one.
	_Atomic uint64_t generation;
	// The generation that the capability files show; 0 while they are changed.
	_Atomic uint64_t capabilities;
	// Changes with every commit, and wakes up those who wait for one.
	_Atomic uint32_t bell;
	uint32_t unused2;
	// What all processes count, beside the machine.
	struct gs_counter counters[GS_MAX_COUNTERS];
	struct gs_fault_count fault_counts[GS_FAULT_COUNTS];
	_Atomic uint64_t busy[GS_MAX_GPUS]; // nanoseconds in exclusive latencies
	_Atomic uint64_t tickets;	    // how many were given
	struct gs_held held[GS_MAX_HELD];
	struct gs_machine slot[2];
};

#endif
