// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Draws one dashboard. What it needs is in /page.json: the panels with the answers to
// their queries.
import 'uplot/dist/uPlot.min.css';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { createTheme } from '@grafana/data';
import { GlobalStyles, PanelChrome, ThemeContext } from '@grafana/ui';
import { framesOf } from './frames.js';
import { Panel } from './panels.jsx';

// The grid of Grafana's pages.
const CELL = 30;
const GAP = 8;
const COLUMNS = 24;
const HEADER = 56;

const theme = createTheme({ colors: { mode: 'dark' } });

function place({ x, y, w, h }) {
  const column = (window.innerWidth - GAP) / COLUMNS;
  return { left: GAP + x * column, top: HEADER + y * (CELL + GAP), width: w * column - GAP, height: h * (CELL + GAP) - GAP };
}

function Framed({ panel, range }) {
  const style = place(panel.gridPos);
  if (panel.type === 'row') {
    return <div style={{ ...style, position: 'absolute', fontSize: 16, lineHeight: `${CELL}px` }}>{panel.title}</div>;
  }
  const frames = framesOf(panel, theme);
  return (
    <div style={{ ...style, position: 'absolute' }}>
      <PanelChrome title={panel.title} description={panel.description} width={style.width} height={style.height} padding={panel.type === 'table' ? 'none' : 'sm'}>
        {(width, height) => <Panel panel={panel} frames={frames} theme={theme} width={width} height={height} range={range} />}
      </PanelChrome>
    </div>
  );
}

function Header({ title, variables }) {
  const box = { border: `1px solid ${theme.colors.border.medium}`, borderRadius: 2, padding: '4px 10px', marginLeft: 8, background: theme.colors.background.primary };
  return (
    <div style={{ display: 'flex', alignItems: 'center', height: HEADER, padding: `0 ${GAP}px`, fontSize: 14 }}>
      <span style={{ fontSize: 20, marginRight: 24 }}>{title}</span>
      {variables.map(({ label, value }) => (
        <span key={label} style={{ display: 'flex', alignItems: 'center', marginRight: 16 }}>
          {label}
          <span style={box}>{value}</span>
        </span>
      ))}
    </div>
  );
}

const page = await (await fetch('/page.json')).json();
createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={theme}>
    <GlobalStyles />
    <Header {...page} />
    {page.panels.map((panel) => (
      <Framed key={`${panel.id}/${panel.title}`} panel={panel} range={page.range} />
    ))}
  </ThemeContext.Provider>
);
