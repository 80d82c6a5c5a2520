// The versions of Kubernetes are in the other .mod files here, one each; go wants one of this name, too.
module github.com/partage-dev/partage/test/cluster/versions

go 1.26.6

toolchain go1.26.10
