// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// GPUs as strips of memory slices.

import { color } from "./colors.js";
import { h } from "./dom.js";
import { amounts, bytes, count, full, gpuKey, kinds, link, state, used } from "./format.js";

/** claimsOf returns the keys of the claims on a GPU, in their order, without observers. */
export function claimsOf(gpu) {
  return [...new Set(gpu.blocks.flatMap((b) => (b.parts ?? []).map((p) => p.claim)))];
}

/** unsure reports whether claims may have more of a GPU, that could not be read. */
export function unsure(gpu) {
  return gpu.blocks.some((b) => b.kind === "unknown" || b.atLeast);
}

/** describe says in words what a strip shows. */
export function describe(gpu) {
  const claims = claimsOf(gpu).map(full);
  const free = gpu.blocks.filter((b) => b.kind === "free").reduce((n, b) => n + b.size, 0);
  const words = [gpu.label, gpu.model];
  words.push(claims.length ? `${count(claims.length, "claim")}: ${claims.join(", ")}` : unsure(gpu) ? "no claims known" : "no claims");
  if (unsure(gpu)) words.push("what is free is unknown");
  else if (gpu.slices > 1) words.push(`${free} of ${gpu.slices} memory slices free`);
  for (const badge of gpu.notes ?? []) words.push(badge.text);
  return words.join("; ");
}

export function badge(b) {
  return h("span", { class: `badge ${b.bad ? "bad" : "hint"}`, title: b.title }, h("span", { "aria-hidden": "true" }, b.bad ? "✖ " : "▲ "), b.text);
}

/** card shows a GPU with everything on it. */
export function card(node, gpu) {
  const key = gpuKey(node, gpu.name);
  return h("article", { class: "gpu", "data-gpu": key, "aria-label": describe(gpu) },
    h("header", {},
      h("a", { class: "gpu-name", href: link(key), "data-nav": true, title: gpu.name }, gpu.label),
      (gpu.notes ?? []).map(badge),
      (gpu.observers ?? []).length > 0 && h("a", { class: "badge plain", href: link(gpu.observers[0]), title: `Watched with admin access by ${gpu.observers.map(full).join(", ")}` }, "watched"),
      gpu.usage && h("span", { class: "usage muted", title: used(gpu.usage).join("\n") }, [gpu.usage.memory === undefined ? "" : `${bytes(gpu.usage.memory) || "0 MiB"} used`, state(gpu.usage)].filter(Boolean).join(" · ")),
      h("span", { class: "fits muted", title: (gpu.fits ?? []).join("\n") }, fits(gpu))),
    strip(gpu));
}

function fits(gpu) {
  const all = gpu.fits ?? [];
  if (all.length === 0) return gpu.use === "full" ? "full" : "nothing fits";
  return `fits ${all.slice(0, 3).join(" · ")}${all.length > 3 ? " …" : ""}`;
}

export function strip(gpu) {
  return h("div", { class: "strip", style: { "--slices": gpu.slices } }, gpu.blocks.map((b) => block(b, gpu)));
}

function block(b, gpu) {
  const place = { "grid-column": `${b.start + 1} / span ${b.size}` };
  if (b.total) return shared(b, place);
  if (b.parts?.length) {
    const claim = b.parts[0].claim;
    return h("a", {
      class: "block claimed", href: link(claim), "data-claim": claim, style: { ...place, "--claim": color(claim) },
      title: [full(claim), b.profile || kinds[b.kind] || b.kind, slices(b, gpu), ...used(b.parts[0].usage)].join("\n"),
    }, h("b", {}, b.parts[0].whose), h("span", {}, [b.profile || kinds[b.kind] || b.kind, state(b.parts[0].usage)].filter(Boolean).join(" · ")), meter(b.parts[0].usage));
  }
  if (b.kind === "unknown") return h("div", { class: "block free", style: place, title: [b.why, slices(b, gpu)].join("\n") }, h("span", {}, "?"));
  const free = b.kind === "free";
  const text = b.profile ? [h("b", {}, b.profile), h("span", {}, free ? "exists, free" : b.why)] : h("span", {}, free ? "free" : b.why);
  return h("div", { class: `block ${free ? "free" : "blocked"}`, style: place, title: [free ? "Free" : "Cannot be allocated", b.why, slices(b, gpu)].filter(Boolean).join("\n") }, text);
}

/** meter shows how much is used of the memory that a claim has. */
function meter(usage) {
  if (usage?.memory === undefined || !usage.of) return null;
  return h("i", { class: "meter", "aria-hidden": "true", style: { "--used": `${Math.min(100, (100 * usage.memory) / usage.of)}%` } });
}

function slices(b, gpu) {
  if (gpu.slices < 2) return bytes(gpu.memory);
  const at = (i) => gpu.cells?.[i] ?? i;
  return b.size === 1 ? `memory slice ${at(b.start)}` : `memory slices ${at(b.start)} to ${at(b.start + b.size - 1)}`;
}

/** shared shows a device that several claims have a part of: as fill levels where the parts
 *  have limits, and as places where they do not. */
function shared(b, place) {
  const parts = b.parts ?? [];
  const taken = parts.reduce((n, p) => n + Math.max(1, p.shares ?? 1), 0);
  const head = `${kinds[b.kind] ?? b.kind}${b.profile ? ` on ${b.profile}` : ""}`;
  const levels = [];
  if (b.total.memory && parts.some((p) => p.memory)) levels.push(level("memory", b, b.total.memory, (p) => p.memory ?? 0, bytes, true));
  if (b.total.sm && parts.some((p) => p.sm)) levels.push(level("SM", b, b.total.sm, (p) => p.sm ?? 0, (n) => `${n} %`, levels.length === 0));
  if (levels.length === 0) {
    const free = Math.max(0, b.total.shares - taken); // or taken by others who are not known
    levels.push(h("div", { class: "level" }, h("span", { class: "level-name" }, "shares"), h("div", { class: "fill" },
      parts.map((p) => part(p, `${100 / b.total.shares}%`, "", true)),
      Array.from({ length: free }, () => h("span", { class: "rest", style: { width: `${100 / b.total.shares}%` } }, b.atLeast ? "?" : "free")))));
  }
  return h("div", { class: "block shared", style: place },
    h("div", { class: "shared-head" }, h("b", {}, head), h("span", {}, `${least(b)}${taken} of ${count(b.total.shares, "share")} taken`)), levels);
}

const least = (b) => (b.atLeast ? "at least " : "");

function level(title, b, total, of, text, named) {
  const parts = b.parts ?? [];
  const used = parts.reduce((n, p) => n + of(p), 0);
  return h("div", { class: "level" }, h("span", { class: "level-name" }, title),
    h("div", { class: "fill", title: `${least(b)}${text(used)} of ${text(total)} ${title} taken` },
      parts.map((p) => part(p, `${(100 * of(p)) / Math.max(total, used)}%`, text(of(p)), named)),
      used < total && h("span", { class: "rest", style: { width: `${(100 * (total - used)) / total}%` } }, b.atLeast ? "?" : text(total - used))));
}

function part(p, width, text, named) {
  const inside = named ? [h("b", {}, p.whose), h("span", {}, [text, state(p.usage)].filter(Boolean).join(" · ")), meter(p.usage)] : h("span", {}, text);
  return h("a", {
    class: "part", href: link(p.claim), "data-claim": p.claim, style: { width, "--claim": color(p.claim) },
    title: [full(p.claim), amounts(p) || "a share without limits", ...used(p.usage)].join("\n"),
    tabindex: named ? null : -1, "aria-hidden": named ? null : "true",
  }, inside);
}

/** mini is a GPU in the overview: one element, whatever is on it. */
export function mini(node, gpu) {
  const key = gpuKey(node, gpu.name);
  const stops = [];
  const add = (fill, from, to) => stops.push(`${fill} ${from}% ${to}%`);
  const whole = gpu.slices;
  for (const b of gpu.blocks) {
    const at = (x) => (100 * (b.start + x * b.size)) / whole;
    if (b.total) {
      let x = 0;
      const fraction = (p) => (b.total.memory && p.memory ? p.memory / b.total.memory : Math.max(1, p.shares ?? 1) / b.total.shares);
      for (const p of b.parts ?? []) {
        const next = Math.min(1, x + fraction(p));
        add(color(p.claim), at(x), at(next));
        x = next;
      }
      if (x < 1) add("transparent", at(x), at(1));
    } else if (b.parts?.length) {
      const gap = Math.min(0.06, 0.2 / b.size);
      add(color(b.parts[0].claim), at(0), at(1 - gap));
      add("transparent", at(1 - gap), at(1));
    } else {
      add(b.kind !== "blocked" ? "transparent" : "var(--blocked)", at(0), at(1));
    }
  }
  const text = describe(gpu);
  return h("a", {
    class: `mini${gpu.bad ? " bad" : ""}`, href: link(key), "data-gpu": key, "data-nav": true, "data-claims": claimsOf(gpu).join(" "),
    title: text, "aria-label": text, style: { background: `linear-gradient(90deg, ${stops.join(", ")})` },
  }, gpu.bad && h("span", { "aria-hidden": "true" }, "✖"));
}
