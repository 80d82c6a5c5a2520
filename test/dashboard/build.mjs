// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Bundles the page into the folder given.
import { build } from 'esbuild';

await build({
  entryPoints: ['src/page.jsx'],
  outdir: process.argv[2],
  bundle: true,
  // The CommonJS files: the others import old modules in a way that bundlers take differently.
  alias: {
    '@grafana/data': './node_modules/@grafana/data/dist/cjs/index.cjs',
    '@grafana/ui': './node_modules/@grafana/ui/dist/cjs/index.cjs',
  },
  minify: true,
  format: 'esm',
  target: 'chrome120',
  jsx: 'automatic',
  loader: { '.svg': 'dataurl', '.woff': 'dataurl', '.woff2': 'dataurl', '.ttf': 'dataurl' },
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' },
  logLevel: 'warning',
});
