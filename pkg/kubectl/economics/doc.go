// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package economics knows what sharing GPUs costs and saves, what each mechanism isolates, and which
// mechanism suits which workload: the commands advise, which gives the manifest, and cost, which goes
// by what claims have now. Formulas and rules are pure.
//
// Formulas, tables and rules have the ids (E1 to E6, D1 to D10) under which the tests name
// them. They are those of published articles; where Partage differs, the tests have both.
package economics
