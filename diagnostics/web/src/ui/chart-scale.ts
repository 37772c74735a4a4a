// The x axis of a chart: steps or times, gaps in time, ticks, and marks that share a position. Pure functions.

import type { GapDocument, MarkDocument, SeriesDocument } from "../api/documents";

export type Axis = "step" | "time";

/** The x values, ascending. `rows` holds the index of each in the series, -1 where the line breaks. */
export interface Across {
  axis: Axis;
  values: readonly number[];
  rows: readonly number[];
  /** The limits of the axis; null: those of the values. */
  min: number | null;
  max: number | null;
  gaps: readonly GapDocument[];
}

type Steps = Pick<SeriesDocument, "step" | "at_unix_s" | "gaps" | "range">;

/**
 * Return the x values. On a time axis lines break at gaps, in which nothing was trained. `endS`: the end of the time axis if
 * the range has none.
 */
export function acrossOf(series: Steps, axis: Axis, endS: number | null): Across {
  if (axis === "step") {
    return { axis, values: series.step, rows: series.step.map((_, row) => row), min: null, max: null, gaps: [] };
  }
  const values: number[] = [];
  const rows: number[] = [];
  let gap = 0;
  let before = Number.NEGATIVE_INFINITY;
  series.at_unix_s.forEach((at, row) => {
    if (at === null) {
      return;
    }
    const found = series.gaps[gap];
    if (found !== undefined && at > found.begin_unix_s) {
      gap += 1;
      if (values.length > 0) {
        values.push(Math.max(before, found.begin_unix_s));
        rows.push(-1);
      }
    }
    before = Math.max(before, at); // clocks of hosts may step back a little; the x values must ascend
    values.push(before);
    rows.push(row);
  });
  const { begin_unix_s: min, end_unix_s: end } = series.range;
  return { axis, values, rows, min, max: end ?? endS, gaps: series.gaps };
}

/** Return when a step ended, interpolated between known steps; null outside of them. */
export function endOfStep(series: SeriesDocument, step: number): number | null {
  const index = series.step.findIndex((one) => one >= step);
  const [last, before] = [series.step[index], series.step[index - 1]];
  const [at, earlier] = [series.at_unix_s[index] ?? null, series.at_unix_s[index - 1] ?? null];
  if (last === step || last === undefined || at === null) {
    return last === step ? at : null;
  }
  return before === undefined || earlier === null ? null : earlier + ((step - before) / (last - before)) * (at - earlier);
}

/** Return a column of the series in the order of the x values; null breaks the line. */
export function columnAcross(across: Across, values: readonly (number | null)[] | undefined): (number | null)[] {
  return across.rows.map((row) => (row < 0 || values === undefined ? null : (values[row] ?? null)));
}

/** The kinds of marks, the most severe first. Of marks that share a position, the most severe is drawn. */
export const MARK_KINDS: readonly MarkDocument["kind"][] = ["incident", "bad", "note", "config", "round", "checkpoint"];

/** Marks too close together to draw separately. `mark` is the most severe of them, `x` its position. */
export interface MarkGroup {
  x: number;
  mark: MarkDocument;
  marks: readonly MarkDocument[];
  /** The number of occurrences; a mark may stand for several. */
  count: number;
}

/** Return the position of a mark; null if it is unknown. */
export function placeOf(mark: MarkDocument, axis: Axis): number | null {
  return axis === "step" ? mark.step : mark.at_unix_s;
}

/** Group marks that are less than `leastPx` apart. `xOf`: the pixel of a step or time; null: not on the chart. */
export function groupMarks(
  marks: readonly MarkDocument[], axis: Axis, xOf: (value: number) => number | null, leastPx: number,
): MarkGroup[] {
  const placed: { x: number; mark: MarkDocument }[] = [];
  for (const mark of marks) {
    const place = placeOf(mark, axis);
    const x = place === null ? null : xOf(place);
    if (x !== null) {
      placed.push({ x, mark });
    }
  }
  placed.sort((a, b) => a.x - b.x);
  const groups: MarkGroup[] = [];
  let first = 0;
  while (first < placed.length) {
    const begin = placed[first]!.x;
    let end = first;
    while (end < placed.length && placed[end]!.x - begin < leastPx) {
      end += 1;
    }
    const within = placed.slice(first, end);
    const worst = within.reduce((a, b) => (MARK_KINDS.indexOf(b.mark.kind) < MARK_KINDS.indexOf(a.mark.kind) ? b : a));
    const own = within.map((one) => one.mark);
    groups.push({ x: worst.x, mark: worst.mark, marks: own, count: own.reduce((sum, one) => sum + one.count, 0) });
    first = end;
  }
  return groups;
}

/** Return the first and last step, or time, of a group with a margin: the range that a click on the group selects. */
export function extentOf(group: MarkGroup, axis: Axis): [number, number] {
  let [first, last] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  for (const mark of group.marks) {
    const begin = placeOf(mark, axis);
    const end = axis === "step" ? mark.last_step : mark.last_unix_s;
    first = Math.min(first, begin ?? first);
    last = Math.max(last, end ?? begin ?? last);
  }
  const room = Math.max((last - first) * 0.1, axis === "step" ? 5 : 30);
  return [Math.max(0, first - room), last + room];
}

const NICE_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800, 1_209_600,
  2_592_000,
];

/** Return the times of ticks: whole seconds, minutes, hours or days of the zone. `offsetS`: the zone's offset from UTC. */
export function timeTicks(min: number, max: number, most: number, offsetS: number): number[] {
  const span = max - min;
  const every = NICE_S.find((one) => span / one <= most) ?? Math.ceil(span / most);
  const found: number[] = [];
  for (let at = Math.ceil((min + offsetS) / every) * every - offsetS; at <= max; at += every) {
    found.push(at);
  }
  return found;
}

/**
 * Return the labels of ticks: the time of day, with the date if that of the previous tick differs; the date alone if ticks are
 * whole days apart.
 */
export function timeTickTexts(ticks: readonly number[], offsetS: number): string[] {
  const every = ticks.length > 1 ? ticks[1]! - ticks[0]! : 3600;
  let day = "";
  return ticks.map((tick) => {
    const text = new Date((tick + offsetS) * 1000).toISOString();
    const date = text.slice(5, 10);
    const time = every % 60 === 0 ? text.slice(11, 16) : text.slice(11, 19);
    const shown = every % 86_400 === 0 ? date : date === day ? time : `${time}\n${date}`;
    day = date;
    return shown;
  });
}
