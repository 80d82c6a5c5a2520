// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package admission tests what an API server makes of the chart's objects, as the golden
// files have them, and of the documentation's example of a namespace for a tenant. It runs
// the API server's own code, which decodes, defaults, converts, validates and admits, and
// no cluster.
package admission
