// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// A colour for each claim. The colours are the "light" scheme of Paul Tol's notes on colours
// for all readers: people with any colour vision can tell them apart, and black text can be
// read on each. Names are always there, too, so that nothing depends on colours alone.

const PALETTE = ["#77aadd", "#ee8866", "#44bb99", "#eedd88", "#ffaabb", "#bbcc33", "#99ddff"];

const given = new Map();

function hash(text) {
  let n = 2166136261;
  for (let i = 0; i < text.length; i++) n = Math.imul(n ^ text.charCodeAt(i), 16777619);
  return n >>> 0;
}

/** assign gives the claims of a node colours: for each GPU its claims. There are fewer colours than
 *  claims, so that a claim gets the one that is least in sight: on its own GPU, on the GPUs beside
 *  it, on the node. It keeps its colour as long as the page is open. */
export function assign(gpus) {
  gpus.forEach((claims, at) => {
    for (const claim of claims) {
      if (given.has(claim)) continue;
      const seen = PALETTE.map(() => 0);
      gpus.forEach((others, i) => {
        const weight = { 0: 1000, 1: 30 }[Math.abs(i - at)] ?? 1;
        for (const other of others) if (given.has(other)) seen[given.get(other)] += weight;
      });
      const first = hash(claim) % PALETTE.length;
      const turns = PALETTE.map((_, i) => (first + i) % PALETTE.length);
      given.set(claim, turns.reduce((best, i) => (seen[i] < seen[best] ? i : best)));
    }
  });
}

export const color = (claim) => PALETTE[given.get(claim) ?? hash(claim) % PALETTE.length];
