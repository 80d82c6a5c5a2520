// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// A library that needs what no C library has, as one does that was built for a newer one than the image's.
extern int partage_symbol_of_a_newer_library;

int *partage_needs(void)
{
	return &partage_symbol_of_a_newer_library;
}
