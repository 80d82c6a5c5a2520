// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The panel that shows one GPU, claim, pod or node, with links to the others.

import { color } from "./colors.js";
import { h } from "./dom.js";
import { age, amounts, bytes, count, full, gpuKey, kinds, link, used } from "./format.js";
import { badge, claimsOf, strip, unsure } from "./strips.js";

/** panel returns what is to be shown of a part. */
export function panel(store, key) {
  const kind = key.split("/", 1)[0];
  const part = kind === "gpu" ? findGPU(store, key) : store.get(key);
  if (!part) return frame(kind, full(key), [h("p", { class: "muted" }, gone(store, kind))]);
  switch (kind) {
    case "gpu": return gpuPanel(store, part);
    case "claim": return claimPanel(store, key, part);
    case "pod": return podPanel(store, part);
    case "node": return nodePanel(store, part);
    default: return frame("", full(key), [h("p", { class: "muted" }, "There is nothing of this kind.")]);
  }
}

function gone(store, kind) {
  return store.get("meta")?.loading ? "The cluster is still being read." : `There is no such ${kind === "gpu" ? "GPU" : kind}, or it has ended.`;
}

const titles = { gpu: "GPU", claim: "Claim", pod: "Pod", node: "Node" };

function frame(kind, title, content) {
  return [
    h("div", { class: "detail-head" },
      h("div", {}, h("p", { class: "kind" }, titles[kind] ?? ""), h("h2", { id: "detail-title", tabindex: "-1" }, title)),
      h("a", { class: "close", href: "#/", "aria-label": "Close the details", title: "Close (Esc)" }, "✕")),
    ...content,
  ];
}

const facts = (...rows) => h("dl", { class: "facts" }, rows.filter((r) => r && r[1] && r[1].length !== 0).map(([term, value]) => [h("dt", {}, term), h("dd", {}, value)]));
const lines = (texts) => texts.map((t) => h("div", {}, t));
const section = (title, ...content) => (content.flat().length ? h("section", {}, h("h3", {}, title), ...content) : null);
const notes = (badges) => h("ul", { class: "notes" }, badges.map((b) => h("li", {}, badge(b), h("p", {}, b.title))));

function findGPU(store, key) {
  const [, node, gpu] = key.split("/");
  const n = store.get(`node/${node}`);
  const found = n?.gpus.find((g) => g.name === gpu);
  return found ? { node: n, gpu: found } : null;
}

function gpuPanel(store, { node, gpu }) {
  const claims = claimsOf(gpu);
  return frame("gpu", `${gpu.label} on ${node.name}`, [
    strip(gpu),
    gpu.notes?.length ? notes(gpu.notes) : null,
    facts(["Node", h("a", { href: link(`node/${node.name}`) }, node.name)], ["Model", gpu.model], ["Memory", bytes(gpu.memory)],
      ["Use", lines(used(gpu.usage))],
      ["Cells of the strip", gpu.slices > 1 ? `${gpu.slices}: memory slices; one that no partition takes alone is in the cell before it` : "cannot be partitioned now"], ["PCI address", gpu.pci], ["UUID", gpu.uuid && h("code", {}, gpu.uuid)],
      ["Device", h("code", {}, gpu.name)], ["Driver", [gpu.driver, gpu.cuda && `CUDA ${gpu.cuda}`].filter(Boolean).join(", ")]),
    section("Claims", claims.length ? claimList(store, claims, gpu) : h("p", { class: "muted" }, unsure(gpu) ? "A claim that you may not read may have something of this GPU." : "No claim has anything of this GPU.")),
    gpu.observers?.length ? section("Watched by", claimList(store, gpu.observers, gpu)) : null,
    section("What still fits", gpu.fits?.length
      ? h("ul", { class: "chips" }, gpu.fits.map((f) => h("li", {}, f)))
      : h("p", { class: "muted" }, "Nothing."),
    gpu.fits?.length > 1 ? h("p", { class: "muted small" }, "Each by itself: what takes one may leave no room for another.") : null),
  ]);
}

function claimList(store, claims, gpu) {
  return h("ul", { class: "list" }, claims.map((c) => {
    const held = (store.get(c)?.devices ?? []).filter((d) => d.gpu === gpu.name);
    return h("li", {}, h("a", { href: link(c) }, dot(c), titled(store, c)), h("span", { class: "muted" }, [...new Set(held.map(what))].join("; ")),
      held.flatMap((d) => used(d.usage)).map((t) => h("span", { class: "small muted" }, t)));
  }));
}

/** titled is who uses a claim and, where that is something else, the name of the claim. */
function titled(store, key) {
  const claim = store.get(key);
  return claim && claim.whose !== claim.name ? `${claim.ns}/${claim.whose} (claim ${claim.name})` : full(key);
}

const dot = (claim) => h("span", { class: "dot", "aria-hidden": "true", style: { "--claim": color(claim) } });

function what(d) {
  const device = d.profile && d.type !== "mig" ? `${kinds[d.type]} on ${d.profile}` : d.profile || kinds[d.type] || d.type;
  return [device, amounts(d)].filter(Boolean).join(", ");
}

function claimPanel(store, key, claim) {
  return frame("claim", full(key), [
    facts(["State", claim.state], ["Age", age(claim.created)]),
    section("Devices", claim.devices?.length
      ? h("ul", { class: "list" }, claim.devices.map((d) => h("li", {},
        d.gpu ? h("a", { href: link(gpuKey(d.node, d.gpu)) }, dot(key), gpuTitle(store, d)) : h("span", {}, d.device),
        h("span", { class: "muted" }, what(d)), used(d.usage).map((t) => h("span", { class: "small" }, t)),
        h("code", { class: "small" }, d.device),
        d.gone && h("p", { class: "bad-text" }, "No ResourceSlice has this device."),
        d.notReady && [badge(d.notReady), h("p", { class: "small" }, d.notReady.title)])))
      : h("p", { class: "muted" }, "None yet.")),
    section("Pods", claim.pods?.length || claim.others?.length
      ? h("ul", { class: "list" }, (claim.pods ?? []).map((p) => podItem(store, p)), (claim.others ?? []).map((o) => h("li", {}, o, h("span", { class: "muted" }, "cannot be read"))))
      : h("p", { class: "muted" }, claim.state === "allocated" ? "No pod uses it: the devices are taken for nothing." : "No pod uses it.")),
    section("Asks for", (claim.requests ?? []).map((r) => h("div", { class: "request" }, h("p", {}, h("b", {}, r.name), ` ${r.text}`), (r.selectors ?? []).map((s) => h("pre", {}, s))))),
  ]);
}

function gpuTitle(store, d) {
  return `${store.get(`node/${d.node}`)?.gpus.find((g) => g.name === d.gpu)?.label ?? d.gpu} on ${d.node}`;
}

function podItem(store, key) {
  const pod = store.get(key);
  return h("li", {}, h("a", { href: link(key) }, full(key)), h("span", { class: "muted" }, pod ? [pod.phase, pod.node].filter(Boolean).join(" on ") : ""));
}

function podPanel(store, pod) {
  return frame("pod", `${pod.ns}/${pod.name}`, [
    pod.waiting || pod.stuck ? explanation(pod) : null,
    facts(["State", pod.phase], ["Node", pod.node && (store.get(`node/${pod.node}`) ? h("a", { href: link(`node/${pod.node}`) }, pod.node) : pod.node)],
      ["Owner", pod.owner], ["Age", age(pod.created)]),
    section("Claims", pod.claims?.length
      ? h("ul", { class: "list" }, pod.claims.map((c) => h("li", {}, h("a", { href: link(c) }, dot(c), full(c)), h("span", { class: "muted" }, store.get(c)?.state ?? ""),
        (store.get(c)?.devices ?? []).map((d) => d.gpu && h("a", { class: "small", href: link(gpuKey(d.node, d.gpu)) }, gpuTitle(store, d))))))
      : h("p", { class: "muted" }, "None yet.")),
    pod.scheduler ? section("The scheduler says", h("p", { class: "small" }, pod.scheduler)) : null,
    section("Commands", h("pre", {}, `kubectl gpu explain pod/${pod.name} -n ${pod.ns}\nkubectl describe pod ${pod.name} -n ${pod.ns}`)),
  ]);
}

function explanation(pod) {
  if (!pod.explanation) return null;
  return section(pod.stuck ? "Why it is stuck" : "Why it waits", h("p", { class: "verdict" }, pod.explanation.verdict), pod.explanation.text && h("pre", { class: "explanation" }, pod.explanation.text));
}

function nodePanel(store, node) {
  const least = store.get("meta")?.summary.atLeast ? "at least " : "";
  const used = node.gpus.filter((g) => g.use === "part" || g.use === "full").length;
  return frame("node", node.name, [
    node.notes?.length ? notes(node.notes) : null,
    facts(["GPUs", `${node.gpus.length}, ${least}${used} in use`], ["Models", [...new Set(node.gpus.map((g) => g.model))].join(", ")], ["Driver", node.gpus[0]?.driver]),
    section("GPUs", h("ul", { class: "list" }, node.gpus.map((g) => h("li", {}, h("a", { href: link(gpuKey(node.name, g.name)) }, g.label),
      h("span", { class: "muted" }, claimsOf(g).map((c) => store.get(c)?.whose ?? full(c)).join(", ") || { unknown: "unknown", none: "cannot be allocated" }[g.use] || "free"), (g.notes ?? []).map(badge), strip(g))))),
  ]);
}
