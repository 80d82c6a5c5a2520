// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Package catalog knows the GPU boards and machines that can be simulated.
//
// Boards are data, one file each under boards/. Every value is tagged with
// where it comes from: a section's source holds for all of its values except
// those that its "except" map names.
//
//   - measured: seen on the real board, or in a transcript of a tool run on the
//     real board that was published (the file's comment says which);
//   - documented: NVIDIA's documentation says so;
//   - assumed: an inference, most often from a similar board.
//
// Instance ids follow the rule that the transcripts show: a GPU's memory slices
// are the leaves of a binary tree, and a GPU instance has the number of the
// tree node that it covers (7g is 0, the halves are 1 and 2, the quarters 3 to
// 6, the eighths 7 to 14). The i-th id of a profile belongs to its i-th
// placement; ids beyond the placements are those of the slices that the board
// has disabled, and some GPUs use them, since their tree is mirrored.
//
// Latencies are data too, in latencies.yaml. They are models that give calls
// plausible proportions, not measurements: what is known of the time that calls
// take on real boards are single observations, and their sources are tagged in
// the same way.
package catalog
