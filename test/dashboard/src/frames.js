// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// What Grafana's Prometheus data source and its core do between the answers of
// Prometheus and the panels: data frames, with the panel's configuration in each field.
import { FieldType, getDisplayProcessor, getFieldDisplayName } from '@grafana/data';

// legend fills in a legend's format. Without one, all labels are shown.
function legend(format, labels) {
  if (format) {
    return format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '').trim();
  }
  return JSON.stringify(labels);
}

// seriesFrames makes a frame of each series. An instant query has one sample in each.
function seriesFrames({ target, result }) {
  return (result ?? []).map((series) => {
    const samples = series.values ?? [series.value];
    const name = legend(target.legendFormat, series.metric);
    return {
      refId: target.refId,
      length: samples.length,
      fields: [
        { name: 'Time', type: FieldType.time, config: {}, values: samples.map((s) => s[0] * 1000) },
        // @grafana/ui forgets display names when it joins frames, which Grafana does not; colours
        // by name then look at the field's name.
        { name, type: FieldType.number, labels: series.metric, config: { displayNameFromDS: name }, values: samples.map((s) => Number(s[1])) },
      ],
    };
  });
}

// tableFrame makes one frame with a column for each label.
function tableFrame({ target, result }) {
  const rows = result ?? [];
  const labels = [...new Set(rows.flatMap((row) => Object.keys(row.metric)))].sort();
  return {
    refId: target.refId,
    length: rows.length,
    fields: [
      { name: 'Time', type: FieldType.time, config: {}, values: rows.map((row) => row.value[0] * 1000) },
      ...labels.map((label) => ({ name: label, type: FieldType.string, config: {}, values: rows.map((row) => row.metric[label] ?? '') })),
      { name: 'Value', type: FieldType.number, config: {}, values: rows.map((row) => Number(row.value[1])) },
    ],
  };
}

// set puts a property such as "custom.hidden" into a field's configuration.
function set(config, id, value) {
  const path = id.split('.');
  const last = path.pop();
  let at = config;
  for (const part of path) {
    at = at[part] = { ...at[part] };
  }
  at[last] = value;
}

// configure gives a field the panel's defaults, and the overrides for its name.
function configure(field, frame, frames, { defaults, overrides }, theme) {
  const name = getFieldDisplayName(field, frame, frames);
  field.config = { ...structuredClone(defaults), ...field.config };
  for (const override of overrides) {
    if (override.matcher.id !== 'byName') {
      throw new Error(`override by ${override.matcher.id}: only byName is known here`);
    }
    if (override.matcher.options === name) {
      override.properties.forEach(({ id, value }) => set(field.config, id, value));
    }
  }
  // Colours by name look for the name here.
  field.state = { ...field.state, displayName: undefined };
  field.state.displayName = getFieldDisplayName(field, frame, frames);
  field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
  if (field.config.links) {
    field.getLinks = () => field.config.links.map(({ title }) => ({ href: '#', title, target: '_self' }));
  }
}

// limit gives all numbers of a panel the same largest value where it has none of its own,
// so that bars can be compared.
function limit(frames) {
  const numbers = frames.flatMap((frame) => frame.fields).filter((field) => field.type === FieldType.number);
  const max = Math.max(...numbers.flatMap((field) => field.values));
  numbers.forEach((field) => (field.config.max ??= max));
}

// framesOf returns the frames of a panel.
export function framesOf(panel, theme) {
  const frames = panel.results.flatMap((answer) => (answer.target.format === 'table' ? [tableFrame(answer)] : seriesFrames(answer)));
  let series = 0;
  for (const frame of frames) {
    for (const field of frame.fields) {
      if (field.type === FieldType.number) {
        field.state = { seriesIndex: series++ };
      }
      configure(field, frame, frames, panel.fieldConfig, theme);
    }
  }
  if (panel.type === 'bargauge') {
    limit(frames);
  }
  return frames;
}
