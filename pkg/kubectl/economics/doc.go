// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package economics holds what is known about sharing GPUs as numbers, tables and rules:
// what it costs and saves, what each mechanism isolates, which hardware can do what, and
// which mechanism suits which workload. Everything is pure.
//
// Formulas, tables and rules have the ids (E1 to E6, D1 to D10) under which the tests name
// them. They are those of published articles; where Partage differs, both are here.
package economics
