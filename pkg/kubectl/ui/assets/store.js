// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What the server says, as it changes.

/** After so long without a word the connection is taken for lost; the server sends a beat
 *  every ten seconds. */
const SILENCE = 25_000;
const RETRY = 2_000;

/** Store has the parts of the page by key and tells a listener which have changed. */
export class Store {
  parts = new Map();
  #onChange;
  #onConnection;
  #source = null;
  #timer = 0;
  #pending = null;

  constructor(onChange, onConnection) {
    this.#onChange = onChange;
    this.#onConnection = onConnection;
  }

  /** connect listens to the server, and goes on after every interruption. */
  connect() {
    this.#source?.close();
    const source = new EventSource("events");
    this.#source = source;
    source.addEventListener("all", (e) => this.#all(JSON.parse(e.data).set ?? {}));
    source.addEventListener("change", (e) => this.#change(JSON.parse(e.data)));
    source.addEventListener("beat", () => this.#alive());
    source.onopen = () => this.#alive();
    source.onerror = () => this.#lost();
    this.#watch();
  }

  get(key) { return this.parts.get(key); }

  /** all returns the parts that are wanted and whose key begins with a prefix, in the order of the keys. */
  all(prefix, wanted = () => true) {
    return [...this.parts].filter(([key, part]) => key.startsWith(prefix) && wanted(key, part)).sort(([a], [b]) => byName(a, b));
  }

  #all(set) {
    // After an interruption most is as it was, and does not have to be drawn again.
    const changed = new Set([...this.parts.keys()].filter((key) => !Object.hasOwn(set, key)));
    for (const [key, part] of Object.entries(set)) if (!equal(part, this.parts.get(key))) changed.add(key);
    this.parts = new Map(Object.entries(set));
    this.#alive();
    this.#tell(changed);
  }

  #change({ set = {}, gone = [] }) {
    for (const [key, value] of Object.entries(set)) this.parts.set(key, value);
    for (const key of gone) this.parts.delete(key);
    this.#alive();
    this.#tell(new Set([...Object.keys(set), ...gone]));
  }

  /** tell collects changes until the next frame. */
  #tell(changed) {
    if (this.#pending) {
      for (const key of changed) this.#pending.add(key);
      return;
    }
    this.#pending = changed;
    setTimeout(() => {
      const all = this.#pending;
      this.#pending = null;
      this.#onChange(all);
    });
  }

  #alive() {
    this.#onConnection("live");
    this.#watch();
  }

  #watch() {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#lost(), SILENCE);
  }

  #lost() {
    this.#onConnection("lost");
    clearTimeout(this.#timer);
    this.#source.close();
    this.#timer = setTimeout(() => this.connect(), RETRY);
  }
}

/** equal compares parts, whose fields the server always sends in the same order. */
const equal = (a, b) => JSON.stringify(a) === JSON.stringify(b);

const collator = new Intl.Collator("en", { numeric: true });
export const byName = (a, b) => collator.compare(a, b);
