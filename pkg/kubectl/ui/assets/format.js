// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Words and numbers for people.

export function bytes(n) {
  if (!n) return "";
  const gib = n / 2 ** 30;
  return gib >= 1 ? `${gib >= 100 ? Math.round(gib) : trim(gib.toFixed(1))} GiB` : `${Math.round(n / 2 ** 20)} MiB`;
}

const trim = (s) => s.replace(/\.0$/, "");

export function age(time) {
  if (!time) return "";
  const s = Math.max(0, (Date.now() - Date.parse(time)) / 1000);
  for (const [unit, length] of [["d", 86400], ["h", 3600], ["min", 60]]) {
    if (s >= length) return `${Math.floor(s / length)} ${unit}`;
  }
  return `${Math.floor(s)} s`;
}

export const count = (n, one, many = `${one}s`) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

/** name is the last part of a key, full what comes after its kind. */
export const name = (key) => key.slice(key.lastIndexOf("/") + 1);
export const full = (key) => key.slice(key.indexOf("/") + 1);
export const namespace = (key) => key.split("/")[1];

/** link is where a part is shown. */
export const link = (key) => `#/${key.split("/").map(encodeURIComponent).join("/")}`;
export const gpuKey = (node, gpu) => `gpu/${node}/${gpu}`;

export const model = (product) => product.replace(/^NVIDIA /, "");

export const kinds = { gpu: "whole GPU", mig: "partition", mps: "MPS", timeslice: "time slices", observer: "observer" };

/** state says in a word whether something is at work, "" where that is not known. */
export function state(usage) {
  if (usage?.idle) return `idle ${age(usage.idle)}`;
  return usage?.busy === undefined ? "" : `${usage.busy} %`;
}

const NONE = "0 MiB";

/** used says what is used, a line for each thing that is known. */
export function used(usage) {
  if (!usage) return [];
  if (usage.unknown) return [`What it uses is unknown: ${usage.unknown}.`];
  const memory = usage.memory === undefined ? "Memory used: unknown" : `Memory used: ${bytes(usage.memory) || NONE}${usage.of ? ` of ${bytes(usage.of)}` : ""}`;
  const busy = usage.busy === undefined ? "Busy: unknown" : `Busy: ${usage.busy} %`;
  return [memory, usage.idle ? `Idle for ${age(usage.idle)}` : busy];
}

/** amounts says what a part of a shared device is. */
export function amounts(part) {
  return [bytes(part.memory), part.sm ? `${part.sm} % SM` : "", part.shares > 1 ? count(part.shares, "share") : ""].filter(Boolean).join(", ");
}
