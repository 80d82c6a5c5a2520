// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The page: what is shown when something changes, is chosen or filtered.

import { Filters, chosen } from "./choose.js";
import { assign } from "./colors.js";
import { panel } from "./detail.js";
import { h } from "./dom.js";
import { age, bytes, count, full, link, model } from "./format.js";
import { Store } from "./store.js";
import { badge, card, claimsOf, mini } from "./strips.js";

/** More GPUs than this are shown as an overview, if nothing else is chosen. */
const MANY = 96;

const $ = (id) => document.getElementById(id);

const cards = new Map(); // by the key of the node: {element, shows}
let before = null; // what had the focus before the panel opened

const store = new Store(changed, connection);
const filters = new Filters($("filters"), showAll);

function changed(keys) {
  if (keys.has("meta")) showMeta();
  filters.offer(store);
  // What a filter matches may depend on claims and pods of a GPU.
  const nodes = filters.active ? null : [...keys].filter((k) => k.startsWith("node/"));
  showNodes(nodes);
  showWaiting();
  showDetail(false);
}

function showAll() {
  showNodes(null);
  showWaiting();
  showSelection();
}

function connection(state) {
  const pill = $("connection");
  if (pill.dataset.state === state) return;
  pill.dataset.state = state;
  pill.textContent = state === "live" ? "Live" : "Connection lost, trying again";
  document.body.classList.toggle("stale", state !== "live");
}

function showMeta() {
  const meta = store.get("meta");
  if (!meta) return;
  const s = meta.summary;
  const least = s.atLeast ? "at least " : "";
  $("context").textContent = meta.context ?? "";
  document.title = `${least}${s.used} of ${count(s.gpus, "GPU")} in use${meta.context ? ` · ${meta.context}` : ""}`;
  const tile = (term, value, extra, state) => h("div", { class: state }, h("dt", {}, term), h("dd", {}, value.toLocaleString("en"), extra && h("span", {}, ` ${extra}`)));
  $("summary").replaceChildren(
    tile("GPUs", s.gpus, `on ${count(s.nodes, "node")}`),
    tile("In use", least + s.used.toLocaleString("en"), `by ${least}${count(s.claims, "claim")}`),
    s.unknown ? tile("Free", "unknown") : tile("Free", s.free, [s.gpus ? `${Math.round((100 * s.free) / s.gpus)} %` : "", s.room ? `room on ${s.room} more` : ""].filter(Boolean).join(", ")),
    s.told ? tile("Memory used", s.memory ? bytes(s.memory) : "0 MiB", `of ${bytes(s.of)}${s.told < s.gpus ? ` on ${count(s.told, "GPU")} that tell` : ""}`) : tile("Memory used", "unknown"),
    tile("Waiting pods", s.waiting, s.stuck ? `and ${s.stuck} stuck` : "", s.waiting || s.stuck ? "warn" : ""),
    tile("Unhealthy", s.unhealthy, "", s.unhealthy ? "alarm" : ""));
  $("problems").replaceChildren(...problems(meta));
}

function problems(meta) {
  const all = (meta.problems ?? []).map((p) => h("div", { class: `banner ${p.forbidden ? "warn" : "alarm"}`, role: "alert" },
    p.forbidden
      ? h("p", {}, h("b", {}, "You may not ", h("code", {}, `${p.verb} ${p.resource}`), p.namespace ? ` in namespace ${p.namespace}.` : " in the whole cluster."), ` ${p.unknown ?? ""}`)
      : h("p", {}, h("b", {}, h("code", {}, `${p.verb} ${p.resource}`), " failed."), " What is shown may be old."),
    h("p", { class: "small muted" }, p.message)));
  if (meta.loading && all.length === 0) all.push(h("div", { class: "banner", role: "status" }, h("p", {}, "Reading the cluster …")));
  return all;
}

function overview(visible) {
  const view = filters.values.view;
  return view ? view === "overview" : visible > MANY;
}

/** showNodes shows the nodes with these keys anew, or all. */
function showNodes(keys) {
  const nodes = store.all("node/");
  let gpus = 0;
  let all = 0;
  const visible = new Map();
  for (const [key, node] of nodes) {
    const shown = node.gpus.map((g) => filters.gpu(store, node, g));
    visible.set(key, shown);
    gpus += shown.filter(Boolean).length;
    all += shown.length;
  }
  const small = overview(gpus);
  const list = $("nodes");
  if (list.classList.contains("overview") !== small) {
    list.classList.toggle("overview", small);
    keys = null;
  }
  const focused = document.activeElement?.closest?.("#nodes [href]")?.getAttribute("href");
  const renew = keys && new Set(keys);
  const elements = [];
  for (const [key, node] of nodes) {
    if (!cards.has(key) || !renew || renew.has(key)) cards.set(key, nodeCard(key, node, visible.get(key), small));
    if (visible.get(key).some(Boolean)) elements.push(cards.get(key));
  }
  for (const key of cards.keys()) if (!visible.has(key)) cards.delete(key);
  place(list, elements);
  $("shown").textContent = filters.active ? `${gpus.toLocaleString("en")} of ${count(all, "GPU")}` : "";
  const empty = $("empty");
  empty.hidden = gpus > 0;
  empty.textContent = all > 0 ? "No GPU matches the filter." : store.get("meta")?.loading === false || store.get("meta") && !store.get("meta").loading ? `No node publishes GPUs of the driver ${store.get("meta").driver}.` : "";
  rove(list, focused);
  showSelection();
}

/** place makes the elements the children of a list, and moves only what has to move. */
function place(list, elements) {
  elements.forEach((element, i) => {
    if (list.children[i] !== element) list.insertBefore(element, list.children[i] ?? null);
  });
  while (list.children.length > elements.length) list.lastChild.remove();
}

function nodeCard(key, node, visible, small) {
  const models = Map.groupBy(node.gpus, (g) => g.model);
  const title = [...models].map(([name, gpus]) => `${gpus.length} × ${model(name)}`).join(", ");
  assign(node.gpus.map(claimsOf));
  const shown = node.gpus.map((g, i) => visible[i] && (small ? mini : card)(node.name, g));
  return h("section", { class: "node", "data-node": key, "aria-label": `Node ${node.name}` },
    h("header", {}, h("h3", {}, h("a", { href: link(key), "data-nav": true }, node.name)), h("span", { class: "muted" }, title), (node.notes ?? []).map(badge)),
    h("div", { class: small ? "minis" : "gpus" }, shown));
}

/** rove leaves one link among the nodes in the order of the tab key; arrows go to the others. */
function rove(list, focused) {
  const all = [...list.querySelectorAll("[data-nav]")];
  if (all.length === 0) return;
  const again = focused && list.querySelector(`[href="${CSS.escape(focused)}"]`);
  if (list.classList.contains("overview")) {
    const current = again ?? all[0];
    for (const a of all) a.tabIndex = a === current ? 0 : -1;
  }
  if (again && document.activeElement !== again) again.focus({ preventScroll: true });
}

$("nodes").addEventListener("keydown", (e) => {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[e.key];
  const from = e.target.closest("[data-nav]");
  if (!step || !from) return;
  const vertical = e.key === "ArrowDown" || e.key === "ArrowUp";
  const all = [...$("nodes").querySelectorAll(vertical ? "h3 [data-nav]" : "[data-nav]")];
  const at = vertical ? all.indexOf(from.closest(".node").querySelector("h3 [data-nav]")) : all.indexOf(from);
  const next = all[at + step];
  if (!next) return;
  e.preventDefault();
  from.tabIndex = $("nodes").classList.contains("overview") ? -1 : 0;
  next.tabIndex = 0;
  next.focus();
});

function showWaiting() {
  const pods = store.all("pod/", (key, p) => (p.waiting || p.stuck) && filters.pod(key, p));
  $("waiting").hidden = pods.length === 0;
  const stuck = pods.filter(([, p]) => p.stuck).length;
  const waiting = pods.length - stuck;
  $("waiting-title").textContent = [waiting || !stuck ? count(waiting, "waiting pod") : "", stuck ? count(stuck, "stuck pod") : ""].filter(Boolean).join(", ");
  $("waiting-list").replaceChildren(...pods.map(([key, p]) => h("li", {},
    h("a", { href: link(key), "data-pod": key }, full(key)), h("span", { class: "muted" }, [p.stuck ? "stuck" : "", p.created ? `for ${age(p.created)}` : ""].filter(Boolean).join(" ")),
    h("p", {}, p.explanation?.verdict ?? p.scheduler ?? (p.stuck ? "Its containers do not start." : "The scheduler has not said anything yet.")))));
  showMore();
}

/** showDetail shows what is chosen. A panel that shows it already keeps focus and scroll. */
function showDetail(opened) {
  const key = chosen();
  const aside = $("detail");
  document.body.classList.toggle("with-detail", key !== "");
  aside.hidden = key === "";
  if (key === "") {
    aside.replaceChildren();
    return;
  }
  const focused = aside.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  const scroll = opened ? 0 : aside.scrollTop;
  aside.replaceChildren(...panel(store, key).flat().filter(Boolean));
  aside.scrollTop = scroll;
  if (opened) $("detail-title")?.focus({ preventScroll: true });
  else if (focused) aside.querySelector(`[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  showSelection();
}

/** showSelection marks what is chosen where it is. */
function showSelection() {
  const key = chosen();
  for (const e of document.querySelectorAll(".selected")) e.classList.remove("selected");
  const claims = new Set(key.startsWith("claim/") ? [key] : key.startsWith("pod/") ? store.get(key)?.claims ?? [] : []);
  document.body.classList.toggle("claim-chosen", claims.size > 0 && [...claims].some((c) => store.get(c)?.devices?.length));
  if (claims.size > 0) {
    for (const e of document.querySelectorAll("[data-claim]")) if (claims.has(e.dataset.claim)) e.classList.add("selected");
    for (const e of document.querySelectorAll("[data-claims]")) if (e.dataset.claims.split(" ").some((c) => claims.has(c))) e.classList.add("selected");
  }
  const attribute = { gpu: "data-gpu", node: "data-node", pod: "data-pod" }[key.split("/", 1)[0]];
  if (attribute) for (const e of document.querySelectorAll(`[${attribute}="${CSS.escape(key)}"]`)) e.classList.add("selected");
}

addEventListener("hashchange", () => {
  if (chosen() === "") {
    showDetail(true);
    showSelection();
    if (before) document.querySelector(`#nodes [href="${CSS.escape(before)}"], #waiting [href="${CSS.escape(before)}"]`)?.focus({ preventScroll: true });
    return;
  }
  showDetail(true);
});

document.addEventListener("click", (e) => {
  const a = e.target.closest?.("main a[href^='#/']");
  if (a) before = a.getAttribute("href");
});

document.addEventListener("keydown", (e) => {
  if (e.key === "Escape" && chosen() !== "" && e.target.tagName !== "INPUT") location.hash = "#/";
});

$("skip").addEventListener("click", (e) => {
  e.preventDefault(); // the fragment is for what is chosen
  $("nodes-title").focus();
});

/** showMore marks the list of waiting pods while there are more below. */
function showMore() {
  const list = $("waiting-list");
  list.classList.toggle("more", list.scrollTop + list.clientHeight < list.scrollHeight - 1);
}
$("waiting-list").addEventListener("scroll", showMore);
new ResizeObserver(showMore).observe($("waiting-list"));

// Ages grow without news from the server.
setInterval(showAll, 60_000);

showDetail(true);
store.connect();
