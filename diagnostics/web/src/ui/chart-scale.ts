// Where things lie along a chart: steps or moments across, gaps in time, ticks, and marks that share a place. Pure.

import type { GapDocument, MarkDocument, SeriesDocument } from "../api/documents";

export type Axis = "step" | "time";

/** What lies across: `values` ascend; `rows` say which entry of the series each is, -1 where the line breaks. */
export interface Across {
  axis: Axis;
  values: readonly number[];
  rows: readonly number[];
  /** The ends of the picture; null: those of the values. */
  min: number | null;
  max: number | null;
  gaps: readonly GapDocument[];
}

/** Return what lies across. Over time lines break at gaps: nothing was trained there. `endS`: where the picture ends. */
export function acrossOf(series: SeriesDocument, axis: Axis, endS: number | null): Across {
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
    before = Math.max(before, at); // hosts' clocks may go back a little, a chart's axis may not
    values.push(before);
    rows.push(row);
  });
  const { begin_unix_s: min, end_unix_s: end } = series.range;
  return { axis, values, rows, min, max: end ?? endS, gaps: series.gaps };
}

/** Return when a step ended, between two that are known in proportion; null beside them. */
export function endOfStep(series: SeriesDocument, step: number): number | null {
  const index = series.step.findIndex((one) => one >= step);
  const [last, before] = [series.step[index], series.step[index - 1]];
  const [at, earlier] = [series.at_unix_s[index] ?? null, series.at_unix_s[index - 1] ?? null];
  if (last === step || last === undefined || at === null) {
    return last === step ? at : null;
  }
  return before === undefined || earlier === null ? null : earlier + ((step - before) / (last - before)) * (at - earlier);
}

/** Return a column of the series in the order of what lies across; null breaks the line. */
export function columnAcross(across: Across, values: readonly (number | null)[] | undefined): (number | null)[] {
  return across.rows.map((row) => (row < 0 || values === undefined ? null : (values[row] ?? null)));
}

const KINDS: readonly MarkDocument["kind"][] = ["incident", "bad", "note", "config", "round", "checkpoint"];

/** Return the kinds of marks, the gravest first: it shows where several share a place. */
export function markKinds(): readonly MarkDocument["kind"][] {
  return KINDS;
}

/** Marks that no picture can tell apart. `mark` is the gravest of them, `x` its place. */
export interface MarkGroup {
  x: number;
  mark: MarkDocument;
  marks: readonly MarkDocument[];
  /** How many things happened; a mark may stand for several. */
  count: number;
}

/** Return where a mark stands; null where that is not known. */
export function placeOf(mark: MarkDocument, axis: Axis): number | null {
  return axis === "step" ? mark.step : mark.at_unix_s;
}

/** Group marks whose places are less than `leastPx` apart. `xOf`: pixels of a step or moment; null: not in the picture. */
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
    const gravest = within.reduce((a, b) => (KINDS.indexOf(b.mark.kind) < KINDS.indexOf(a.mark.kind) ? b : a));
    const own = within.map((one) => one.mark);
    groups.push({ x: gravest.x, mark: gravest.mark, marks: own, count: own.reduce((sum, one) => sum + one.count, 0) });
    first = end;
  }
  return groups;
}

/** Return the first and last step, or moment, of a group: where the picture goes when it is opened. */
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

/** Return the moments of ticks: whole minutes, hours and days of the zone. `offsetS`: of the zone from UTC. */
export function timeTicks(min: number, max: number, most: number, offsetS: number): number[] {
  const span = max - min;
  const every = NICE_S.find((one) => span / one <= most) ?? Math.ceil(span / most);
  const found: number[] = [];
  for (let at = Math.ceil((min + offsetS) / every) * every - offsetS; at <= max; at += every) {
    found.push(at);
  }
  return found;
}

/** Return the texts of ticks: the time of day, and the day where it is another one than at the tick before. */
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
