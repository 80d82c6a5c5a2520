// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What the server says, as it changes.

/** How often the server is asked, and how long it may take to answer until the connection is taken for lost. */
const INTERVAL = 2_000;
const PATIENCE = 25_000;

/** Store has the parts of the page by key and tells a listener which have changed. */
export class Store {
  parts = new Map();
  #onChange;
  #onConnection;
  #tag = "";

  constructor(onChange, onConnection) {
    this.#onChange = onChange;
    this.#onConnection = onConnection;
  }

  /** connect asks the server for what has changed, and again after a while. */
  async connect() {
    try {
      const answer = await fetch("model.json", { headers: { "If-None-Match": this.#tag }, signal: AbortSignal.timeout(PATIENCE) });
      if (answer.status !== 304) {
        if (!answer.ok) throw new Error(answer.statusText);
        const parts = await answer.json();
        this.#tag = answer.headers.get("ETag") ?? "";
        this.#all(parts);
      }
      this.#onConnection("live");
    } catch {
      this.#onConnection("lost");
    }
    setTimeout(() => this.connect(), INTERVAL);
  }

  get(key) { return this.parts.get(key); }

  /** all returns the parts that are wanted and whose key begins with a prefix, in the order of the keys. */
  all(prefix, wanted = () => true) {
    return [...this.parts].filter(([key, part]) => key.startsWith(prefix) && wanted(key, part)).sort(([a], [b]) => byName(a, b));
  }

  #all(set) {
    // Most is as it was, and does not have to be drawn again.
    const changed = new Set([...this.parts.keys()].filter((key) => !Object.hasOwn(set, key)));
    for (const [key, part] of Object.entries(set)) if (!equal(part, this.parts.get(key))) changed.add(key);
    this.parts = new Map(Object.entries(set));
    this.#onChange(changed);
  }
}

/** equal compares parts, whose fields the server always sends in the same order. */
const equal = (a, b) => JSON.stringify(a) === JSON.stringify(b);

const collator = new Intl.Collator("en", { numeric: true });
export const byName = (a, b) => collator.compare(a, b);
