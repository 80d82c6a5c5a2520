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

/** address is the part of a PCI address in which the GPUs of a node differ. */
export const address = (pci) => (pci ?? "").replace(/^0000:/, "").replace(/\.0$/, "");

export const model = (product) => product.replace(/^NVIDIA /, "");

export const kinds = { gpu: "whole GPU", mig: "partition", mps: "MPS", timeslice: "time slices", observer: "observer" };

/** amounts says what a part of a shared device is. */
export function amounts(part) {
  return [bytes(part.memory), part.sm ? `${part.sm} % SM` : "", part.shares > 1 ? count(part.shares, "share") : ""].filter(Boolean).join(", ");
}
