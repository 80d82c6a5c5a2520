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

/** assign gives each claim of a GPU a colour that no neighbour has, if there are enough. A claim
 *  keeps its colour as long as the page is open. */
export function assign(claims) {
  const used = new Set(claims.map((c) => given.get(c)).filter((i) => i !== undefined));
  for (const claim of claims) {
    if (given.has(claim)) continue;
    let i = hash(claim) % PALETTE.length;
    for (let tries = 0; used.has(i) && tries < PALETTE.length; tries++) i = (i + 1) % PALETTE.length;
    used.add(i);
    given.set(claim, i);
  }
}

export const color = (claim) => PALETTE[given.get(claim) ?? hash(claim) % PALETTE.length];
