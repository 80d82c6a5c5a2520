# SPDX-FileCopyrightText: The Partage Authors
# SPDX-License-Identifier: Apache-2.0

# Everything is built for the machine it is built on. Go's own variables work:
# GOARCH=arm64 CC=aarch64-linux-gnu-gcc make build

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# No flags that change what the compiler makes: builds, tests and lint share a cache with
# each other and with a plain `go test`. The version comes from git below, so a checkout
# that belongs to another user is no error. Tests are not analysed: make lint does that.
export GOFLAGS := -buildvcs=false -vet=off $(GOFLAGS)
export CGO_ENABLED := 1

VERSION ?= $(shell git describe --tags --dirty 2>/dev/null || echo devel)
COMMIT ?= $(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null)
VERSION_PKG := github.com/partage-dev/partage/pkg/util/version
# Without the tracing pages of gRPC and the templates of the command line's help, which nobody
# sees, the linker leaves out every method that nothing calls: see test/flow/metrics.
GO_TAGS := grpcnotrace,urfave_cli_no_template
# NVIDIA's hook is cgo, and runs on hosts that may have no dynamic loader where glibc's is.
NVIDIA_TOOLKIT := github.com/NVIDIA/nvidia-container-toolkit
GO_STATIC = -tags netgo,osusergo -ldflags '-s -w -X $(NVIDIA_TOOLKIT)/internal/info.version=$(shell go list -m -f '{{.Version}}' $(NVIDIA_TOOLKIT)) -linkmode external -extldflags -static'
NVIDIA_HOOK := $(NVIDIA_TOOLKIT)/cmd/nvidia-cdi-hook
GO_LDFLAGS := -s -w -X $(VERSION_PKG).version=$(VERSION) -X $(VERSION_PKG).commit=$(COMMIT)

OUT := _output
# The demos and the cluster tests expect this one.
MACHINE := dgx-h100
CLUSTER := bin/cluster
HELM := $(OUT)/cluster/bin/helm
ETCD := $(OUT)/cluster/bin/etcd
LINT := $(OUT)/bin/golangci-lint
ACTIONLINT := $(OUT)/bin/actionlint
VULNCHECK := $(OUT)/bin/govulncheck
# How long make soak takes.
SOAK := 10m
# Unit tests run with the race detector, except for packages without goroutines, whose
# tests then start sooner, pkg/node/host, which runs its test binary without a C library, and
# pkg/mps/supervisor, which runs its test binary as the control program: with the detector
# that takes longer to start than the tests give it.
PLAIN := ./cmd/partage-hook ./pkg/api/... ./pkg/driver/claim/rules/... ./pkg/device/... ./pkg/node/host/... ./pkg/mps/supervisor/... ./pkg/policy/... ./pkg/util/quote/... ./pkg/util/version/... ./templates ./test/chart ./test/docs/... ./test/gpusim/... ./test/hardware/... ./test/knownfailures/... ./test/krew ./test/neighbours ./test/nicdriver/... ./test/release ./test/scale/... ./test/sizes/... ./test/versions ./test/workflows
RACE = $(filter-out $(shell go list $(PLAIN)),$(shell go list ./cmd/... ./pkg/...))

# TEST_LIMIT is how long the tests of a package may take. Each wait in a test has a limit of its own.
TEST_LIMIT ?= 25m

# The longest first. FLOW_WEEKLY is what make test leaves out.
FLOW := $(addprefix ./test/flow/,crash fault claims sharing conformance metrics)
FLOW_WEEKLY := $(addprefix ./test/flow/,soak hardware)

# One thing at a time: what is built must be there before what uses it.
.NOTPARALLEL:

# Says what begins, also to make sizes, which prints how long the parts of the last make test took.
say = @mkdir -p $(OUT); printf '%s\t%s\n' "$$(date +%s)" '$(1)' >>$(OUT)/steps; printf '\n--- %s\n' '$(1)'

# The whole log, and at its end what failed, for those who see the end only.
failed = cat $(1); printf '\nfailed:\n'; grep -E '^ *--- FAIL|^FAIL|^panic:|DATA RACE' $(1); exit 1

# Tests that say what they did: a line for each test and each count of cases. $(1):
# where the rest goes; $(2): arguments of go test.
define verbose
	@mkdir -p $(dir $(1)); go test -v $(2) 2>&1 | tee $(1) | grep --line-buffered -E '^(---|ok|FAIL|panic|enumerations)|[a-z_]+.go:[0-9]+: .*[0-9]+ (cases|crashes|faults|seeds|slow (calls|looks|files)|.* driver started)' || { $(call failed,$(1)); }
endef

# The same with a line for each package instead of each test.
define quiet
	@mkdir -p $(dir $(1)); go test -v $(2) 2>&1 | tee $(1) | grep --line-buffered -E '^(--- FAIL|ok|FAIL|panic)|_test.go:[0-9]+: .*[0-9]+ (cases|crashes|faults|seeds)' || { $(call failed,$(1)); }
endef

##@ Try it

.PHONY: demo
demo: root setup build cluster images ## Start a local Kubernetes with simulated GPUs, install the driver, run all demos
	$(call say,Kubernetes with a simulated $(MACHINE))
	$(CLUSTER) up --machine $(MACHINE)
	@$(CLUSTER) load-image $(OUT)/cluster/images/*.tar >/dev/null
	$(call say,installing the driver with helm)
	$(CLUSTER) run -- demo/install
	$(call say,demos)
	$(CLUSTER) run -- demo/run
	@printf '%s\n' '' \
	  'The cluster keeps running. Look around:' \
	  '  $(CLUSTER) run -- kubectl gpu tree -A                   nodes, GPUs, partitions and shares, and whose they are' \
	  '  $(CLUSTER) run -- kubectl get pods -A' \
	  '  $(CLUSTER) run -- kubectl get resourceslices             what the driver publishes' \
	  '  $(CLUSTER) run -- bin/gpusim show --root /run/gpusim     the GPUs and their MIG instances' \
	  '  $(CLUSTER) run -- demo/run -d                            remove the demos, and so the instances' \
	  'Stop it: make demo-down'

.PHONY: demo-down
demo-down: ## Stop the local Kubernetes; its logs stay
	$(CLUSTER) down

##@ Build

.PHONY: build
build: gpusim ## Build the driver and the test tools into bin/
	$(call say,building the driver and the tools)
	go build -tags '$(GO_TAGS)' -ldflags '$(GO_LDFLAGS)' -o bin/ ./cmd/gpu-kubelet-plugin ./cmd/cuda-probe
	CGO_ENABLED=0 go build -tags '$(GO_TAGS)' -ldflags '$(GO_LDFLAGS)' -o bin/ ./cmd/mps-supervisor ./cmd/partage-hook ./cmd/health-probe ./cmd/kubectl-gpu
	ln -sf kubectl-gpu bin/kubectl_complete-gpu
	@# The linker warns of dlopen, which is for hooks that no spec of this driver has.
	@go build $(GO_STATIC) -o bin/nvidia-cdi-hook $(NVIDIA_HOOK) 2>/dev/null || go build $(GO_STATIC) -o bin/nvidia-cdi-hook $(NVIDIA_HOOK)
	cd test/cluster && CGO_ENABLED=0 go build -o ../../bin/cluster ./cmd/cluster

.PHONY: gpusim
gpusim: ## Build the simulated GPU machine
	$(call say,building the simulated GPUs)
	@# It binds deprecated functions, too. The first compilation warns of each.
	@go build github.com/NVIDIA/go-nvml/pkg/nvml 2>/dev/null || go build github.com/NVIDIA/go-nvml/pkg/nvml
	$(MAKE) --no-print-directory -C test/gpusim/lib OUT=$(CURDIR)/$(OUT)/gpusim/lib
	go build -o bin/gpusim ./test/gpusim/cmd/gpusim
	go build -o $(OUT)/gpusim/bin/ $(addprefix ./test/gpusim/cmd/,nvidia-smi nvidia-cuda-mps-control nvidia-cuda-mps-server cuda-client)
	CGO_ENABLED=0 go build -ldflags '-s -w' -o $(OUT)/gpusim/bin/ ./test/nicdriver/cmd/nic-driver

.PHONY: cluster
cluster: build ## Build Kubernetes, containerd, runc and helm (the first time takes minutes)
	$(call say,building Kubernetes)
	$(CLUSTER) build

# helm alone, of all that the cluster consists of.
$(HELM): build test/cluster/go.mod test/cluster/go.sum
	$(call say,building helm)
	$(CLUSTER) build helm

# etcd alone is no part: it is one program with Kubernetes.
$(ETCD): build test/cluster/go.mod test/cluster/go.sum
	$(call say,building Kubernetes and etcd)
	$(CLUSTER) build 'kubernetes and etcd'

.PHONY: images
images: build cluster ## Build the container images of driver and demos, without docker
	$(call say,building the images)
	$(CLUSTER) images

.PHONY: image
image: pinned ## Build the image for a registry with docker: make image IMAGE=registry.example.com/gpu-kubelet-plugin:dev
	@[[ -n '$(IMAGE)' ]] || { echo 'usage: make image IMAGE=registry.example.com/gpu-kubelet-plugin:dev [BUILD=--push]'; exit 2; }
	VERSION='$(VERSION)' COMMIT='$(COMMIT)' deployments/container/build '$(IMAGE)' $(BUILD)

.PHONY: release-rehearsal
release-rehearsal: root setup build cluster images ## Make a release of this commit for a registry on this machine, and install it from there
	$(call say,rehearsal of a release: log in $(OUT)/release/log)
	test/release/rehearse $(OUT)/release

.PHONY: hardware-bundle
hardware-bundle: build ## Collect in _output/hardware what test/hardware/run needs on a machine with a real GPU
	test/hardware/build bin $(OUT)/hardware

.PHONY: pin-images
pin-images: ## Write the digests of the base images, as their registries have them now
	deployments/container/pin

.PHONY: pinned
pinned:
	@deployments/container/check
	@[[ -e deployments/container/base-images ]] || { echo 'deployments/container/base-images does not exist: make pin-images writes it'; exit 1; }

##@ Test

.PHONY: test
test: root begin setup test-unit test-flow test-allocators helm-check test-monitoring test-ui test-cluster test-admission ## Run all tests that every change needs, with all that they need
	$(call say,known failures that were not seen)
	go run ./test/knownfailures/cmd/unseen $(OUT)/test-*.log
	$(call say,all tests passed)

.PHONY: begin
begin:
	@mkdir -p $(OUT) && printf '%s\tmake test\n' "$$(date +%s)" >$(OUT)/steps && rm -f $(OUT)/test-*.log

.PHONY: test-all
test-all: export PARTAGE_TEST_ALL := 1
test-all: export TEST_LIMIT := 6h
test-all: test test-weekly test-walk test-model ## Run all tests, with all crashes and faults instead of a sample

.PHONY: test-weekly
test-weekly: build test-scale ## Run what make test leaves out: random faults, the script for machines with a GPU, the scheduler's benchmark
	$(call say,flow tests of the week: log in $(OUT)/test-weekly.log)
	$(call verbose,$(OUT)/test-weekly.log,-count=1 -timeout $(TEST_LIMIT) $(FLOW_WEEKLY))

.PHONY: test-walk
test-walk: ## Take random steps with claims from 2,000 seeds
	$(call say,random steps with claims)
	go test -timeout 30m -run '^TestWalk$$' ./pkg/driver/claim -walk.seeds=2000

.PHONY: test-model
test-model: ## Explore the rules about claims in small worlds, 300,000 states of each, those about MPS sessions and about slices
	$(call say,states of the rules about claims)
	go test -timeout 60m -run '^TestScenarios$$' -v ./pkg/driver/claim/rules/model -model.states=300000
	go test -timeout 60m -run '^TestModel$$' -v ./pkg/mps/supervisor/rules -model.troubles=3
	$(call say,states of the rules about ResourceSlices)
	go test -timeout 60m -run '^TestModel$$' -v ./pkg/driver/plugin/publish/rules -model.states=20000

# test/cluster/admission and test/validation import much of Kubernetes, so they are built as Kubernetes
# was, and not analysed: that takes minutes. What they read is outside their modules, so go would take
# old results.
LIKE_KUBERNETES := -trimpath -vet=off

# ./test/cluster is a module of its own; ./test/e2e needs a cluster, that of SUITE.
SUITE := pods
.PHONY: test-one
ifneq (,$(findstring test/e2e,$(PKG)))
test-one: root setup build cluster images prometheus
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	E2E_RUN='$(RUN)' test/e2e/run $(SUITE)
else ifneq (,$(findstring test/cluster,$(PKG)))
test-one:
	cd test/cluster && CGO_ENABLED=0 go test $(if $(findstring cluster/admission,$(PKG)),$(LIKE_KUBERNETES)) -count=1 -v -run '$(RUN)' $(patsubst ./test/cluster/%,./%,$(PKG))
else
test-one: $(if $(findstring test/flow,$(PKG)),build,gpusim) ## Run tests of one package: make test-one PKG=./pkg/device RUN=TestGolden
	@[[ -n '$(PKG)' ]] || { echo 'usage: make test-one PKG=./pkg/device [RUN=TestGolden]'; exit 2; }
	go test -count=1 -v -run '$(RUN)' $(PKG)
endif

# One after the other: tests that wait for each other's processor time use twice as much of it.
.PHONY: test-unit
test-unit: gpusim test-plain test-race ## Test every package by itself

.PHONY: test-plain
test-plain:
	$(call say,unit tests: log in $(OUT)/test-plain.log)
	$(call quiet,$(OUT)/test-plain.log,-timeout $(TEST_LIMIT) $(PLAIN))
	@# Without cmd/kube, which has no tests and imports all of Kubernetes.
	cd test/cluster && CGO_ENABLED=0 go test ./cmd/cluster ./internal/...

.PHONY: test-race
test-race:
	$(call say,unit tests with the race detector: log in $(OUT)/test-race.log)
	$(call quiet,$(OUT)/test-race.log,-race -timeout $(TEST_LIMIT) $(RACE))

.PHONY: test-allocators
test-allocators: ## Run what is published through the allocators of older Kubernetes versions
	$(call say,allocators of Kubernetes versions)
	@mkdir -p $(OUT); : >$(OUT)/test-allocators.log
	cd test/allocators && for file in go.mod versions/*.mod; do go test -modfile=$$file -v . | tee -a $(CURDIR)/$(OUT)/test-allocators.log | grep -vE '^(===|PASS)' || exit 1; done

# Each package has a /proc of its own, see test/flow/harness/alone.go.
.PHONY: test-flow
test-flow: build ## Test the plugin over gRPC against simulated GPUs, without Kubernetes
	$(call say,flow tests: log in $(OUT)/test-flow.log)
	go test ./test/flow/killpoint ./test/flow/harness
	$(call verbose,$(OUT)/test-flow.log,-count=1 -p 1 -timeout $(TEST_LIMIT) $(FLOW))

# What each listed test says, and how long it took: make known-failures COUNT=10. Real pods and other modules are left out.
COUNT := 1
KNOWN := test/knownfailures/list.yaml
.PHONY: known-failures
known-failures: build ## Run the tests of promises that are broken today: COUNT=10 shows that they fail each time
	$(call say,known failures: log in $(OUT)/known-failures.log)
	@tests=$$(sed -n 's/^  test: \([A-Za-z0-9_]*\).*/\1/p' $(KNOWN) | sort -u | paste -sd '|'); [[ -n $$tests ]] || { echo 'None is on the list.'; exit 0; }; \
	go test -count=$(COUNT) -p 1 -v -run "^($$tests)$$" $$(sed -n 's/^- package: /.\//p' $(KNOWN) | grep -vE 'e2e|test/validation' | sort -u) >$(OUT)/known-failures.log 2>&1 || { $(call failed,$(OUT)/known-failures.log); }; \
	grep -o 'known failure of .*' $(OUT)/known-failures.log | sed 's/, after [^:]*//' | sort | uniq -c

# What a machine of another kind can try: packages whose tests do not link NVML. The compiler is the machine's own and the programs
# are emulated, so that it takes minutes, not hours. The emulator starts no programs but the test itself, lacks system calls such as
# openat2, shows a process as another than it is, and is slow with models, storms and fleets: for these ci has a machine of that kind.
NOT_EMULATED := ./cmd/health-probe ./cmd/kubectl-gpu ./cmd/partage-hook ./pkg/driver/cdi/hook ./pkg/driver/claim/rules/model \
	./pkg/driver/plugin/publish ./pkg/kubectl/explain ./pkg/node/host ./pkg/node/process ./pkg/node/process/keeper
WITHOUT_NVML = go list -test -f '{{if eq .Name "main"}}{{.ImportPath}} {{.Deps}}{{end}}' ./cmd/... ./pkg/... | sed -nE '/go-nvml\/pkg\/nvml[] ]/d; s/\.test .*//p'
ARM64 = $(filter-out $(shell go list $(NOT_EMULATED)),$(shell $(WITHOUT_NVML)))
.PHONY: test-arm64
test-arm64: export GOARCH := arm64
test-arm64: export CC := aarch64-linux-gnu-gcc
test-arm64: export QEMU_LD_PREFIX := /usr/aarch64-linux-gnu
test-arm64: root ## Cross-compile everything for arm64, and run unit tests of packages without NVML in an emulator
	$(call say,arm64: log in $(OUT)/test-arm64.log)
	test/release/setup gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static
	@mkdir -p $(OUT)/arm64; \
	go build -tags '$(GO_TAGS)' -ldflags '$(GO_LDFLAGS)' -o $(OUT)/arm64/ ./cmd/... 2>$(OUT)/test-arm64.log || { $(call failed,$(OUT)/test-arm64.log); }; \
	go build $(GO_STATIC) -o $(OUT)/arm64/nvidia-cdi-hook $(NVIDIA_HOOK) 2>>$(OUT)/test-arm64.log || { $(call failed,$(OUT)/test-arm64.log); }; \
	for program in partage-hook mps-supervisor gpu-kubelet-plugin; do qemu-aarch64-static $(OUT)/arm64/$$program version; done; \
	qemu-aarch64-static $(OUT)/arm64/nvidia-cdi-hook --version
	$(call quiet,$(OUT)/test-arm64.log,-exec qemu-aarch64-static -vet=off -short $(ARM64))

.PHONY: soak
soak: build ## Break the driver at random for SOAK=10m, from a new seed each time
	$(call say,soak)
	go test -count=1 -timeout 0 -v -run '^TestSoak$$' ./test/flow/soak -soak.duration=$(SOAK)

.PHONY: test-cluster
test-cluster: root setup build cluster images prometheus ## Test with real pods on local Kubernetes clusters
	$(call say,cluster tests: logs in $(OUT)/test-cluster)
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	cd test/cluster && CGO_ENABLED=0 go build -trimpath -o $(CURDIR)/$(OUT)/nvidia-ctk-installer ./nriplugin
	test/e2e/run | tee $(OUT)/test-cluster.log

.PHONY: test-admission
test-admission: ## Let the API server's code judge what is published, the chart's objects, and claims by its policies
	$(call say,what an API server makes of the chart)
	cd test/cluster && CGO_ENABLED=0 go test $(LIKE_KUBERNETES) -count=1 -v ./admission | tee $(CURDIR)/$(OUT)/test-admission.log | grep -E '^(--- FAIL|ok|FAIL|panic)|_test.go:[0-9]+:'
	$(call say,what an API server makes of what is published)
	cd test/validation && CGO_ENABLED=0 go test $(LIKE_KUBERNETES) -count=1 -v . | tee $(CURDIR)/$(OUT)/test-validation.log | grep -E '^(--- FAIL|ok|FAIL|panic)|_test.go:[0-9]+:'

# test/scale/scheduler starts an API server, which looks for files beside its source: these
# variables are how it finds them in what -trimpath made.
SCALE := $(OUT)/scale
SCHEDULER_TEST = cd test/scale/scheduler && PATH='$(CURDIR)/$(dir $(ETCD))':"$$PATH" TEST_SRCDIR="$$(go env GOMODCACHE)" TEST_WORKSPACE=. CGO_ENABLED=0 \
	go test $(LIKE_KUBERNETES) -count=1 -timeout 30m

.PHONY: test-scale
test-scale: $(ETCD) ## Try the benchmark of the scheduler with a few nodes and pods
	$(call say,benchmark of the scheduler)
	go run ./test/scale/slices -o $(SCALE)/slices
	$(SCHEDULER_TEST) . -slices=$(CURDIR)/$(SCALE)/slices

# What these suites have seen is in testdata.
neighbours-table = go test -count=1 ./test/neighbours -run '^TestTable$$' -update

.PHONY: test-kueue
test-kueue: root setup build cluster images ## Let a real Kueue hold jobs back until there is quota for their GPUs
	$(call say,building Kueue (the first time takes minutes))
	test/kueue/build
	$(call say,Kueue: log in $(OUT)/test-cluster/kueue.log)
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	test/e2e/run kueue
	$(neighbours-table)

.PHONY: test-ai-conformance
test-ai-conformance: root setup build cluster images ## Run the tests of Kubernetes AI Conformance, and ours for what they do not try yet
	$(call say,building the tests of others (the first time takes minutes))
	test/aiconformance/build
	$(call say,Kubernetes AI Conformance: log in $(OUT)/test-cluster/ai-conformance.log)
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	test/e2e/run ai-conformance
	$(neighbours-table)

.PHONY: test-neighbours
test-neighbours: root setup build cluster images ## Run what others put beside the driver, and what is said of their programs in docs/contributing/upstream
	$(call say,building programs of others (the first time takes minutes))
	test/neighbours/build
	$(call say,neighbours: log in $(OUT)/test-cluster/neighbours.log)
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	test/e2e/run neighbours
	go test -count=1 ./test/neighbours/secondopinion
	$(neighbours-table)

.PHONY: test-migration
test-migration: root setup build cluster images ## Follow the migration guides, from NVIDIA's device plugin and DRA driver
	$(call say,building what users come from (the first time takes minutes))
	test/peers/build
	$(call say,migrations: log in $(OUT)/test-cluster/migration.log)
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	test/e2e/run migration
	$(neighbours-table)

# VERSIONS names some of them; test/versions/run says which there are.
VERSIONS :=
.PHONY: test-versions
test-versions: root setup build cluster images ## Test on older versions of Kubernetes, and write docs/reference/compatibility.md
	$(call say,other versions of Kubernetes: logs in $(OUT)/test-versions)
	go test -c -tags e2e -o $(OUT)/e2e.test ./test/e2e
	test/versions/run $(VERSIONS)

.PHONY: helm-check
helm-check: $(HELM) ## Check the chart and the image: lint, golden files, refusals, pins
	$(call say,helm chart)
	HELM=$(CURDIR)/$(HELM) deployments/helm/check
	deployments/container/check

.PHONY: test-monitoring
test-monitoring: $(HELM) prometheus ## Test the chart's alerts and dashboards with Prometheus' own programs
	$(call say,alerts and dashboards)
	HELM=$(CURDIR)/$(HELM) go test -count=1 -v ./test/monitoring/... | grep -E '^(--- FAIL|ok|FAIL|panic)|_test.go:[0-9]+:'

.PHONY: test-ui
test-ui: root ## Try the page of kubectl gpu ui in a real browser
	$(call say,kubectl gpu ui in a browser)
	test/ui/setup.sh
	cd test/ui && CGO_ENABLED=0 go test -count=1 -timeout 30m ./...

PEER := $(OUT)/peers/bin/gpu-kubelet-plugin

.PHONY: bench
bench: build ## Measure Prepare and Unprepare, also with simulated latency, and beside NVIDIA's DRA driver
	go test -run '^$$' -bench . -benchtime 3s ./test/flow/bench
	$(call say,DRA driver of NVIDIA (the first time takes minutes))
	@test/peers/build program || { rm -f $(PEER); echo 'It could not be built, so Partage is measured alone.'; }
	$(call say,side by side)
	go test -run '^$$' -bench . -benchtime 200x -timeout 20m ./test/flow/versus -peer "$$(realpath --quiet --canonicalize-existing $(PEER))"

# Each part says how far it is; what they took is printed at the end. Under 25 minutes on two cores, of which the storm takes seven.
BENCH_SCALE := bench-packing bench-scale-storm bench-scale-memory bench-scale-scheduler bench-scale-fleet
.PHONY: bench-scale
bench-scale: root setup build cluster images ## Measure what large clusters cost: packing, scheduler, control plane
	@took=; for part in $(BENCH_SCALE); do began=$$SECONDS; $(MAKE) --no-print-directory $$part; took+=$$(printf '%24s %5d s' $$part $$((SECONDS - began)))$$'\n'; done; \
	printf '\n%24s %7s\n%s' 'part' 'took' "$$took"

.PHONY: bench-packing
bench-packing: ## Simulate how well partitions are packed, by the order in which they are published
	$(call say,packing)
	go run ./test/scale/cmd/packing

# STORM_NODES is how many nodes there are. 1,000 take 7 minutes of CPU time.
STORM_NODES := 1000
.PHONY: bench-scale-storm
bench-scale-storm: ## Count what GPUs that are at their thermal limit write, in fake time: STORM_NODES=100
	$(call say,writes in a thermal storm)
	go test -count=1 -timeout 60m -run '^TestThermalStorm$$' -v ./pkg/driver/plugin/publish -storm.nodes=$(STORM_NODES) | grep -E '_test.go:[0-9]+:|^(--- FAIL|ok|FAIL|panic)'

# With FLEET='--nodes 1000' it needs 20 GB of memory and half an hour.
FLEET := --nodes 60
.PHONY: bench-scale-fleet
bench-scale-fleet: root setup build cluster images ## Measure what plugins cost the control plane: FLEET='--nodes 200'
	$(call say,building kwok (the first time takes minutes))
	test/scale/fleet/kwok/build
	$(call say,control plane of a large cluster)
	test/scale/fleet/run $(FLEET)

# MEMORY_NODES is how many nodes there are for the scheduler's memory alone.
MEMORY_NODES := 400
.PHONY: bench-scale-memory
bench-scale-memory: ## Measure what published devices take of the scheduler's memory, which takes seconds: MEMORY_NODES=5000
	$(call say,memory of the scheduler)
	go run ./test/scale/slices -o $(SCALE)/slices
	go run ./test/scale/cmd/memory -slices $(SCALE)/slices -nodes $(MEMORY_NODES)

# How large the cluster of bench-scale-scheduler is, and which cases run: a regular expression,
# such as one-1g_. Without one those are left out that tell little more than the others.
NODES := 100
PODS := 200
CASES :=
.PHONY: bench-scale-scheduler
bench-scale-scheduler: $(ETCD) ## Measure what published devices cost the scheduler: NODES=500 PODS=1000 CASES=one-1g
	$(call say,scheduler with $(NODES) nodes: log and profiles in $(SCALE)/scheduler (building it takes minutes the first time))
	go run ./test/scale/slices -o $(SCALE)/slices
	rm -rf $(SCALE)/scheduler && mkdir -p $(SCALE)/scheduler
	@# Without the package's name go test passes on what is printed at once.
	@export ARTIFACTS='$(CURDIR)/$(SCALE)/scheduler'; { $(SCHEDULER_TEST) -run '^$$' -bench 'PerfScheduling/$(or $(CASES),.)' -benchtime 1x \
	  -slices=$(CURDIR)/$(SCALE)/slices -output="$$ARTIFACTS" -nodes=$(NODES) -pods=$(PODS) $(if $(CASES),-all) 2>&1 || touch "$$ARTIFACTS/failed"; } | \
	  tee "$$ARTIFACTS/log" | grep --line-buffered '^ *[0-9.]*s  ' || true; \
	  if [[ -e $$ARTIFACTS/failed ]]; then tail -n 50 "$$ARTIFACTS/log"; exit 1; fi
	@cat $(SCALE)/scheduler/table.txt

# Without cmd/kube and admission, which import much of Kubernetes: analysing that takes minutes.
# The same holds for test/scale/scheduler and test/validation.
LINT_CLUSTER := ./cmd/cluster ./cmd/pause ./integration ./internal/...

.PHONY: lint
lint: $(LINT) $(ACTIONLINT) gpusim ## Check formatting and code of all modules, and the workflows
	$(call say,workflows)
	@# Without the programs that it calls where they happen to be installed.
	$(ACTIONLINT) -shellcheck= -pyflakes=
	$(call say,gofmt)
	@files=$$(gofmt -l cmd pkg test); if [[ -n $$files ]]; then echo "not formatted:"; echo "$$files"; exit 1; fi
	$(call say,golangci-lint and go vet)
	go vet -tags e2e ./...
	$(LINT) run --allow-serial-runners ./...
	@# What people install on their own machines. Tests may use what only Linux has.
	for os in darwin windows; do GOOS=$$os CGO_ENABLED=0 go build -o /dev/null ./cmd/kubectl-gpu; done
	cd test/cluster && CGO_ENABLED=0 go vet -tags cluster $(LINT_CLUSTER) && CGO_ENABLED=0 $(CURDIR)/$(LINT) run --allow-serial-runners --config $(CURDIR)/.golangci.yaml $(LINT_CLUSTER)
	cd test/ui && CGO_ENABLED=0 $(CURDIR)/$(LINT) run --allow-serial-runners --config $(CURDIR)/.golangci.yaml ./...
	cd test/allocators && $(CURDIR)/$(LINT) run --allow-serial-runners --config $(CURDIR)/.golangci.yaml .
	$(call say,go.mod and go.sum of all modules)
	for file in $$(git ls-files '*go.mod' | grep -v versions/); do (cd $$(dirname $$file) && go mod tidy -diff) || { echo "run go mod tidy in $$(dirname $$file)"; exit 1; }; done
	$(call say,licences of what is linked)
	cd test/tools/ci && go vet ./notices && go test ./notices && CGO_ENABLED=0 go build -o $(CURDIR)/$(OUT)/bin/ ./notices
	$(OUT)/bin/notices $(NVIDIA_HOOK) ./cmd/... >/dev/null
	for os in darwin windows; do GOOS=$$os CGO_ENABLED=0 $(OUT)/bin/notices ./cmd/kubectl-gpu >/dev/null; done

# It asks a database on the internet, and finds something whenever somebody else did. With VULNDB=copy it asks a copy of that
# which Go's module proxy has: the version printed says of which day.
VULNDB :=
# What workflows set up and the base images have. Here it may be an older one.
RELEASE_GO := $(shell sed -n 's/^toolchain //p' go.mod)
ask = GOVERSION=$(RELEASE_GO) $(VULNCHECK) $(if $(VULNDB),-db file://$(CURDIR)/$(OUT)/vulndb)
.PHONY: vulnerabilities
vulnerabilities: $(VULNCHECK) ## Look for known vulnerabilities in what the programs call
	$(call say,known vulnerabilities of what $(RELEASE_GO) builds)
	$(if $(VULNDB),rm -rf $(OUT)/vulndb && go mod download -json golang.org/x/vulndb@latest | tee $(OUT)/vulndb.json | grep '"Version"')
	$(if $(VULNDB),CGO_ENABLED=0 go run golang.org/x/vulndb/cmd/indexdb@latest -out $(CURDIR)/$(OUT)/vulndb -vulns "$$(sed -n 's/.*"Dir": "\(.*\)".*/\1/p' $(OUT)/vulndb.json)/data/osv")
	$(ask) -tags '$(GO_TAGS)' ./cmd/... ./pkg/... $(NVIDIA_HOOK)
	@# The archives of kubectl gpu, as deployments/krew/release builds them.
	for os in linux darwin windows; do echo $$os; GOOS=$$os CGO_ENABLED=0 $(ask) ./cmd/kubectl-gpu; done

$(ACTIONLINT) $(VULNCHECK) &: test/tools/ci/go.mod test/tools/ci/go.sum
	$(call say,building actionlint and govulncheck (once))
	cd test/tools/ci && CGO_ENABLED=0 go build -o $(CURDIR)/$(OUT)/bin/ github.com/rhysd/actionlint/cmd/actionlint golang.org/x/vuln/cmd/govulncheck

$(LINT): test/tools/go.mod test/tools/go.sum
	$(call say,building golangci-lint (once))
	cd test/tools && CGO_ENABLED=0 go build -o $(CURDIR)/$@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

##@ Maintain

.PHONY: sizes
sizes: ## Print lines by part and room, words of docs, cases that enumerations ran, seconds of the last make test
	@go run ./test/sizes/cmd/sizes

# Golden files are written by tests whose file says "*update" or "golden", in packages with a
# flag -update. Only these tests run: those of the simulator and of test/flow first, since
# they write what the tests of pkg/device read. ./test/cluster is a module of its own.
.PHONY: golden
golden: build $(HELM) ## Rewrite all golden files from what the code does now; look at the diff
	$(call update-golden,test/gpusim test/flow test/hardware test/neighbours test/versions pkg cmd test/docs)
	cd test/cluster && export CGO_ENABLED=0; $(call update-golden,internal admission)
	HELM=$(CURDIR)/$(HELM) deployments/helm/check -update

# $(1): folders.
define update-golden
for dir in $$(grep -rl --include='*_test.go' '\*update\b' $(1) | xargs -n1 dirname | awk '!seen[$$0]++'); do \
	  tests=$$(grep -liE '\*update\b|golden' $$dir/*_test.go | xargs sed -n 's/^func \(Test[A-Za-z0-9]*\)(.*/\1/p' | paste -sd '|'); \
	  go test -count=1 ./$$dir -run "^($$tests)$$" -update || exit 1; done
endef

# What npm and the browser need is not what tests need, so make test does not do this.
.PHONY: dashboards
dashboards: root prometheus ## Draw the chart's dashboards into docs/images, with Grafana's own components
	$(call say,pictures of the dashboards)
	test/dashboard/setup.sh $(OUT)/dashboard
	go run ./test/dashboard -bundle $(OUT)/dashboard/page

.PHONY: ui-pictures
ui-pictures: root ## Take the pictures of kubectl gpu ui for docs/images
	$(call say,pictures of kubectl gpu ui)
	test/ui/setup.sh
	cd test/ui && CGO_ENABLED=0 go run ./cmd/pictures

.PHONY: clean
clean: ## Remove what was built; refused while a cluster runs
	@if [[ -d $(OUT)/cluster/run ]] && [[ -n $$(ls $(OUT)/cluster/run) ]]; then echo "a cluster is running: make demo-down"; exit 1; fi
	rm -rf bin $(OUT)

##@ Parts of the above

.PHONY: setup
setup: root ## Install the Debian packages that builds and clusters need
	test/cluster/setup.sh

.PHONY: prometheus
prometheus:
	@test/monitoring/setup.sh $(OUT)/prometheus/bin

.PHONY: root
root:
	@if [[ $$(id -u) != 0 ]]; then \
	  echo 'This needs root: it installs packages, makes device nodes and runs containers. Try:'; \
	  echo '  sudo env "PATH=$$PATH" make $(MAKECMDGOALS)'; exit 1; fi

.PHONY: help
help: ## Show this
	@awk 'BEGIN {FS = ":.*## "} \
	  /^##@ / {printf "\n%s\n", substr($$0, 5)} \
	  /^[a-z][a-z0-9-]*:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
