// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// A program that is a client of MPS: the other side of ../../mps. Each packet is
// one JSON value (../../mps/wire.go). Keys are looked for as they are, since
// no value can contain one: UUIDs, numbers, and the name of a file.

#include "cuda.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { PACKET = 64 << 10 };

static char packet[PACKET + 1];

// value is what follows a key in the text, or NULL.
static const char *value(const char *text, const char *key)
{
	char quoted[GS_NAME];
	snprintf(quoted, sizeof(quoted), "\"%s\":", key);
	const char *at = strstr(text, quoted);
	return at == NULL ? NULL : at + strlen(quoted);
}

static int number(const char *text, const char *key)
{
	const char *at = value(text, key);
	return at == NULL ? 0 : atoi(at);
}

// word copies the string that at begins with, without its quotes, and returns
// what follows it.
static const char *word(const char *at, char *out, size_t size)
{
	size_t length = *at == '"' ? strcspn(at + 1, "\"") : 0;
	if (length == 0 || length >= size)
		return NULL;
	memcpy(out, at + 1, length);
	out[length] = '\0';
	return at + length + 2;
}

static int say(const struct program *p, const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	int n = vsnprintf(packet, sizeof(packet), format, arguments);
	va_end(arguments);
	return n > 0 && n <= PACKET && send(p->server, packet, (size_t)n, MSG_NOSIGNAL) == n;
}

// hear waits for a packet; flags are recv's.
static ssize_t hear(const struct program *p, int flags)
{
	ssize_t n;
	do
		n = recv(p->server, packet, PACKET, flags);
	while (n < 0 && errno == EINTR);
	if (n >= 0)
		packet[n] = '\0';
	return n;
}

// dial connects to the control daemon.
static int dial(void)
{
	const char *folder = getenv("CUDA_MPS_PIPE_DIRECTORY");
	struct sockaddr_un to = {.sun_family = AF_UNIX};
	if (folder == NULL || folder[0] == '\0')
		folder = "/tmp/nvidia-mps";
	int n = snprintf(to.sun_path, sizeof(to.sun_path), "%s/control", folder);
	if (n < 0 || (size_t)n >= sizeof(to.sun_path))
		return -1;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&to, sizeof(to)) != 0) {
		close(fd);
		return -1;
	}
	return fd;
}

static uint64_t memory_amount(const char *text, const char **end)
{
	char *after;
	unsigned long long n = isdigit((unsigned char)*text) ? strtoull(text, &after, 10) : 0;
	if (n == 0 || n > UINT32_MAX)
		return 0;
	int unit = toupper((unsigned char)*after);
	*end = after + 1;
	return unit == 'G' ? (uint64_t)n << 30 : unit == 'M' ? (uint64_t)n << 20 : 0;
}

static struct device *named(struct program *p, const char *key, size_t length)
{
	char text[GS_NAME], *end;
	if (length == 0 || length >= sizeof(text))
		return NULL;
	memcpy(text, key, length);
	text[length] = '\0';
	for (int i = 0; i < p->count; i++)
		if (strcmp(p->devices[i].uuid, text) == 0)
			return &p->devices[i];
	long n = strtol(text, &end, 10);
	return *end == '\0' && n >= 0 && n < p->count ? &p->devices[n] : NULL;
}

// own_memory sets the limits of CUDA_MPS_PINNED_DEVICE_MEM_LIMIT. What is no limit
// drops all of them. A device that this program has not voids even the server's.
static void own_memory(struct program *p)
{
	const char *at = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
	int wrong = 0, absent = 0;
	while (!wrong && at != NULL && *at != '\0') {
		const char *equals = strchr(at, '='), *end = NULL;
		uint64_t bytes = equals == NULL ? 0 : memory_amount(equals + 1, &end);
		struct device *d = equals == NULL ? NULL : named(p, at, (size_t)(equals - at));
		wrong = bytes == 0 || (*end != '\0' && *end != ',');
		if (d == NULL)
			absent = 1;
		else
			d->limit = bytes;
		if (!wrong)
			at = *end == ',' ? end + 1 : end;
	}
	for (int i = 0; (wrong || absent) && i < p->count; i++)
		p->devices[i].limit = 0;
	p->void_limits = absent && !wrong;
}

static void own_percentage(struct program *p)
{
	const char *text = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
	double percentage = text == NULL ? 100 : atof(text);
	if (!(percentage > 0 && percentage <= 100))
		percentage = 100;
	for (int i = 0; i < p->count; i++)
		p->devices[i].percentage = percentage;
}

// welcome reads which devices the server has and, where its shared memory has a name, the
// token in it, which shows that both have the same one.
static enum result welcome(struct program *p, char *token, size_t size)
{
	static char uuids[MAX_DEVICES][GS_NAME];
	static const char *served[MAX_DEVICES];
	char name[GS_NAME], path[GS_PATH];
	int count = 0;
	const char *at = value(packet, "devices");
	const char *shared = value(packet, "shared");
	for (at = at == NULL ? NULL : at + 1; at != NULL && *at == '"' && count < MAX_DEVICES; count++) {
		at = word(at, uuids[count], sizeof(uuids[count]));
		served[count] = uuids[count];
		if (at != NULL && *at == ',')
			at++;
	}
	find_devices(p, served, count);
	if (p->count == 0)
		return NO_DEVICE;
	if (shared == NULL) { // it has no name, and nobody has to find it
		token[0] = '\0';
		return SUCCESS;
	}
	if (word(shared, name, sizeof(name)) == NULL)
		return MPS_CONNECTION_FAILED;
	snprintf(path, sizeof(path), "/dev/shm/%s", name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t n = fd < 0 ? -1 : read(fd, token, size - 1);
	if (fd >= 0)
		close(fd);
	if (n <= 0)
		return MPS_CONNECTION_FAILED;
	token[n] = '\0';
	return SUCCESS;
}

static enum result join(struct program *p, const char *token)
{
	static char list[PACKET / 2];
	size_t length = 0;
	own_memory(p);
	own_percentage(p);
	for (int i = 0; i < p->count && length < sizeof(list); i++)
		length += (size_t)snprintf(list + length, sizeof(list) - length, "%s{\"uuid\":\"%s\",\"percentage\":%.17g,\"memory\":%llu}",
					   i == 0 ? "" : ",", p->devices[i].uuid, p->devices[i].percentage,
					   (unsigned long long)p->devices[i].limit);
	if (!say(p, "{\"token\":\"%s\",\"devices\":[%s],\"void\":%s}\n", token, list, p->void_limits ? "true" : "false") || hear(p, 0) <= 0)
		return MPS_CONNECTION_FAILED;
	int code = number(packet, "code");
	const char *at = packet;
	for (int i = 0; code == 0 && i < p->count && (at = value(at, "uuid")) != NULL; i++) {
		const char *percentage = value(at, "percentage"), *memory = value(at, "memory");
		p->devices[i].percentage = percentage == NULL ? 100 : atof(percentage);
		p->devices[i].limit = memory == NULL ? 0 : strtoull(memory, NULL, 10);
	}
	return (enum result)code;
}

enum result mps_connect(struct program *p, int *reached)
{
	char token[GS_NAME];
	p->server = dial();
	*reached = p->server >= 0;
	if (!*reached)
		return SUCCESS;
	if (!say(p, "{}\n") || hear(p, 0) <= 0)
		return MPS_CONNECTION_FAILED;
	enum result r = (enum result)number(packet, "code");
	if (r == SUCCESS)
		r = welcome(p, token, sizeof(token));
	return r == SUCCESS ? join(p, token) : r;
}

// take looks at a packet that may say that the contexts are no good any more.
static int take(struct program *p, ssize_t n)
{
	if (n <= 0)
		p->ended = MPS_RPC_FAILURE;
	else if (value(packet, "ended") != NULL)
		p->ended = number(packet, "code");
	return p->ended;
}

// heed takes what the server has said meanwhile.
static enum result heed(struct program *p)
{
	while (p->ended == 0) {
		ssize_t n = hear(p, MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			break;
		take(p, n);
	}
	return (enum result)p->ended;
}

static enum result ask(struct program *p, const char *op, int device, uint64_t bytes)
{
	if (heed(p) != SUCCESS)
		return (enum result)p->ended;
	if (!say(p, "{\"op\":\"%s\",\"device\":%d,\"bytes\":%llu}\n", op, device, (unsigned long long)bytes))
		return p->ended = MPS_RPC_FAILURE;
	return take(p, hear(p, 0)) != 0 ? (enum result)p->ended : (enum result)number(packet, "code");
}

enum result mps_context(struct program *p, int device)
{
	return ask(p, "newContext", device, 0);
}

enum result mps_alloc(struct program *p, int device, uint64_t bytes)
{
	return ask(p, "alloc", device, bytes);
}

enum result mps_launch(struct program *p, int device)
{
	return ask(p, "launch", device, 0);
}

enum result mps_synchronize(struct program *p, int device)
{
	return ask(p, "synchronize", device, 0);
}

enum result mps_memory(struct program *p, int device, uint64_t *available, uint64_t *total)
{
	enum result r = ask(p, "memory", device, 0);
	const char *f = value(packet, "free"), *t = value(packet, "total");
	if (r == SUCCESS) {
		*available = f == NULL ? 0 : strtoull(f, NULL, 10);
		*total = t == NULL ? 0 : strtoull(t, NULL, 10);
	}
	return r;
}
