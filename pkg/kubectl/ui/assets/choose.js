// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What is chosen: a part of the fleet, in the fragment of the address, and filters, in its
// query. Both survive a reload; the browser's back button goes through the choices.

import { byName } from "./store.js";
import { options } from "./dom.js";
import { claimsOf, unsure } from "./strips.js";
import { full, namespace } from "./format.js";

/** chosen returns the key in the address: gpu/NODE/GPU, claim/NS/NAME, pod/NS/NAME, node/NAME. */
export function chosen() {
  if (!location.hash.startsWith("#/")) return "";
  try {
    return location.hash.slice(2).split("/").map(decodeURIComponent).join("/");
  } catch {
    return ""; // somebody typed an address that is none
  }
}

export class Filters {
  #form;
  values = {};

  constructor(form, onChange) {
    this.#form = form;
    const query = new URLSearchParams(location.search);
    for (const field of form.elements) {
      const value = field.name ? query.get(field.name) : null;
      if (!value) continue;
      if (field.tagName === "SELECT" && ![...field.options].some((o) => o.value === value)) field.add(new Option(value, value));
      field.value = value;
    }
    const changed = () => {
      this.#read();
      onChange();
    };
    form.addEventListener("input", changed);
    form.addEventListener("submit", (e) => e.preventDefault());
    form.addEventListener("reset", () => setTimeout(changed));
    this.#read();
  }

  #read() {
    const query = new URLSearchParams();
    this.values = {};
    for (const field of this.#form.elements) {
      if (!field.name) continue;
      const value = field.value.trim();
      this.values[field.name] = value;
      if (value) query.set(field.name, value);
    }
    const text = query.toString();
    history.replaceState(null, "", location.pathname + (text ? `?${text}` : "") + location.hash);
  }

  /** offer fills the choices with what there is. */
  offer(store) {
    const namespaces = new Set();
    for (const key of store.parts.keys()) if (key.startsWith("claim/") || key.startsWith("pod/")) namespaces.add(namespace(key));
    const nodes = store.all("node/").map(([, n]) => n);
    const models = new Set(nodes.flatMap((n) => n.gpus.map((g) => g.model)));
    const { ns, node, model } = this.#form.elements;
    options(ns, "All", [...namespaces].sort(byName));
    options(node, "All", nodes.map((n) => n.name));
    options(model, "All", [...models].sort(byName));
  }

  get active() { return ["q", "ns", "node", "model", "state"].some((f) => this.values[f]); }

  /** gpu reports whether a GPU is to be shown. */
  gpu(store, node, gpu) {
    const { q, ns, node: only, model, state } = this.values;
    if (only && node.name !== only) return false;
    if (model && gpu.model !== model) return false;
    if (state === "bad" && !gpu.bad) return false;
    if (state === "free" && gpu.use !== "free") return false;
    if (state === "used" && gpu.use !== "part" && gpu.use !== "full") return false;
    if (state === "room" && (gpu.use === "unknown" || unsure(gpu))) return false;
    if (state === "room" && !(gpu.fits ?? []).length) return false;
    const claims = [...claimsOf(gpu), ...(gpu.observers ?? [])];
    if (ns && !claims.some((c) => namespace(c) === ns)) return false;
    if (!q) return true;
    const texts = [node.name, gpu.name, gpu.model, gpu.uuid, gpu.pci, ...claims.map(full)];
    for (const b of gpu.blocks) texts.push(b.profile, b.device);
    for (const c of claims) texts.push(...(store.get(c)?.pods ?? []).map(full));
    for (const b of gpu.notes ?? []) texts.push(b.text);
    return matches(q, texts);
  }

  /** pod reports whether a waiting pod is to be shown. */
  pod(key, pod) {
    const { q, ns, node, model, state } = this.values;
    if (node || model || state) return false;
    if (ns && pod.ns !== ns) return false;
    return !q || matches(q, [full(key), pod.explanation?.verdict]);
  }
}

/** matches reports whether each word is somewhere in the texts. */
function matches(words, texts) {
  const all = texts.filter(Boolean).join("\n").toLowerCase();
  return words.toLowerCase().split(/\s+/).every((w) => all.includes(w));
}
