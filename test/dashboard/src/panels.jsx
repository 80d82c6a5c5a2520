// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// The panels, drawn by the components of @grafana/ui as Grafana's panel plugins use them.
import React from 'react';
import { dateTime, getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation } from '@grafana/data';
import { BarGauge, BigValue, Table, TimeSeries, VizRepeater } from '@grafana/ui';

// reduced returns what the panel shows of each series.
function reduced({ panel, frames, theme }) {
  return getFieldDisplayValues({
    fieldConfig: panel.fieldConfig,
    reduceOptions: panel.options.reduceOptions,
    replaceVariables: (text) => text,
    theme,
    data: frames,
    sparkline: false,
    timeZone: 'utc',
  });
}

const repeater = { itemSpacing: 3, renderCounter: 0, getAlignmentFactors: getDisplayValueAlignmentFactors };

function Stat(props) {
  const { panel, theme, width, height } = props;
  const { colorMode, graphMode, justifyMode, text, textMode, orientation, wideLayout } = panel.options;
  return (
    <VizRepeater
      {...repeater} source={props.frames} width={width} height={height} autoGrid
      orientation={orientation} getValues={() => reduced(props)}
      renderValue={({ value, alignmentFactors, width, height, count }) => (
        <BigValue
          value={value.display} count={count} width={width} height={height} theme={theme} alignmentFactors={alignmentFactors}
          colorMode={colorMode} graphMode={graphMode} justifyMode={justifyMode} text={text} textMode={textMode} wideLayout={wideLayout}
        />
      )}
    />
  );
}

function Bars(props) {
  const { panel, theme, width, height } = props;
  const { orientation, displayMode, valueMode, showUnfilled, namePlacement, minVizHeight, maxVizHeight, minVizWidth } = panel.options;
  return (
    <VizRepeater
      {...repeater} itemSpacing={10} source={props.frames} width={width} height={height} orientation={orientation}
      minVizHeight={minVizHeight} maxVizHeight={maxVizHeight} minVizWidth={minVizWidth} getValues={() => reduced(props)}
      renderValue={({ value, alignmentFactors, orientation, width, height, count }) => (
        <BarGauge
          value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)} width={width} height={height}
          orientation={orientation ?? VizOrientation.Horizontal} itemSpacing={6} lcdCellWidth={8} displayMode={displayMode} valueDisplayMode={valueMode}
          alignmentFactors={count > 1 ? alignmentFactors : undefined} showUnfilled={showUnfilled} namePlacement={namePlacement} theme={theme}
        />
      )}
    />
  );
}

function Series({ panel, frames, width, height, range }) {
  const [from, to] = range.map((seconds) => dateTime(seconds * 1000));
  return (
    <TimeSeries frames={frames} width={width} height={height} timeRange={{ from, to, raw: { from, to } }} timeZone="utc" legend={panel.options.legend} />
  );
}

function Rows({ panel, frames, width, height }) {
  const { cellHeight, showHeader, sortBy } = panel.options;
  return <Table data={frames[0]} width={width} height={height} noHeader={!showHeader} cellHeight={cellHeight} initialSortBy={sortBy} timeRange={{}} />;
}

const components = { stat: Stat, bargauge: Bars, timeseries: Series, table: Rows };

// Panel draws the inside of a panel.
export function Panel(props) {
  const { panel, frames } = props;
  if (frames.every((frame) => frame.length === 0)) {
    return <div style={{ padding: 16, opacity: 0.6, textAlign: 'center' }}>{panel.fieldConfig.defaults.noValue ?? 'No data'}</div>;
  }
  const Component = components[panel.type];
  if (!Component) {
    throw new Error(`panel "${panel.title}": the type ${panel.type} is not known here`);
  }
  return <Component {...props} />;
}
