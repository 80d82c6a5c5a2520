// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Elements without markup: nothing that comes from the cluster is ever read as HTML.

/** Makes an element. Properties that begin with "data-" or "aria-", and some others, are
 *  attributes; "class" is the class; "style" is an object; false and null are left out. */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "style") {
      for (const [property, one] of Object.entries(value)) element.style.setProperty(property, one);
    } else if (name.startsWith("on")) {
      element.addEventListener(name.slice(2), value);
    } else {
      element.setAttribute(name, value === true ? "" : String(value));
    }
  }
  element.append(...children.flat(Infinity).filter((c) => c !== null && c !== undefined && c !== false && c !== ""));
  return element;
}

/** Replaces the options of a select, and keeps its value if it is still there. */
export function options(select, all, values) {
  const chosen = select.value;
  const next = [["", all], ...values.map((v) => [v, v])];
  const same = select.options.length === next.length && next.every(([value], i) => select.options[i].value === value);
  if (same) return;
  if (chosen && !values.includes(chosen)) next.push([chosen, chosen]);
  select.replaceChildren(...next.map(([value, text]) => h("option", { value }, text)));
  select.value = chosen;
}
