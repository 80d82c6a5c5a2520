// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Calls the functions of a library whose names it reads, with zeros for
// arguments, and prints what they return. It is for calls that a fault strikes,
// which look at no argument but to find the GPU.

#include <dlfcn.h>
#include <stdio.h>

typedef int (*function)(void *, void *, void *, void *, void *, void *);

int main(int argc, char **argv)
{
	char name[128];
	void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
	if (library == NULL) {
		fprintf(stderr, "open the library: %s\n", dlerror());
		return 1;
	}
	while (scanf("%127s", name) == 1) {
		function f = (function)dlsym(library, name);
		if (f == NULL) {
			fprintf(stderr, "find %s: %s\n", name, dlerror());
			return 1;
		}
		printf("%d\n", f(NULL, NULL, NULL, NULL, NULL, NULL));
		fflush(stdout);
	}
	return 0;
}
