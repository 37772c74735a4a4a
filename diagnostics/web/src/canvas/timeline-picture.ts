// The timeline as data: slices by line and time, and the placement of lines on the screen.

import type { Arrays } from "./arrays.ts";
import type { Layout } from "./layout.ts";

export const IS_OPEN = 1;
export const HAS_FAILED = 2;
export const NO_CHUNK = 255;

export interface TimelinePicture {
  round: number;
  layout: Layout;
  firstStep: number;
  lastStep: number;
  endNs: number;
  lanes: readonly string[];
  operations: Readonly<Record<string, string>>;
  hosts: readonly string[];
  leftOut: readonly string[];
  notes: readonly string[];
  numSlices: number;
  begin: Float64Array;
  length: Float64Array;
  sequence: Float64Array;
  bytes: Float64Array;
  step: Int32Array;
  microbatch: Int32Array;
  operation: Uint8Array;
  chunk: Uint8Array;
  flags: Uint8Array;
  /** Line l has the slices lineFirst[l] to lineFirst[l + 1] (exclusive), ordered by time and without overlap. */
  lineFirst: Int32Array;
  lineTrack: Int32Array;
  lineDepth: Int32Array;
  trackRank: Int32Array;
  trackLane: Uint8Array;
  trackOverflow: Int32Array;
  rank: Int32Array;
  rankHost: Int32Array;
  /** Pairs of slices: a send and its receive. */
  flows: Int32Array;
  /** The line of each slice in `flows`. */
  flowLines: Int32Array;
  steps: Int32Array;
  stepBegin: Float64Array;
  stepEnd: Float64Array;
}

export interface IdealPicture {
  /** The reason why there is no ideal; empty if there is one. */
  problem: string;
  idealS: number | null;
  notes: readonly string[];
  begin: Float64Array;
  /** Negative: this slice has no ideal. */
  length: Float64Array;
  isCritical: Uint8Array;
  steps: Int32Array;
  replayedS: Float64Array;
}

export function timelinePicture(arrays: Arrays): TimelinePicture {
  const fields = arrays.fields;
  const begin = arrays.doubles("begin");
  const flows = arrays.integers("flows");
  const lineFirst = arrays.integers("line_first");
  return {
    round: Number(fields["round"]),
    layout: fields["layout"] as Layout,
    firstStep: Number(fields["first_step"]),
    lastStep: Number(fields["last_step"]),
    endNs: Number(fields["end_ns"]),
    lanes: arrays.texts("lanes"),
    operations: fields["operations"] as Record<string, string>,
    hosts: arrays.texts("hosts"),
    leftOut: arrays.texts("left_out"),
    notes: arrays.texts("notes"),
    numSlices: begin.length,
    begin,
    length: arrays.doubles("length"),
    sequence: arrays.doubles("sequence"),
    bytes: arrays.doubles("bytes"),
    step: arrays.integers("step"),
    microbatch: arrays.integers("microbatch"),
    operation: arrays.bytes("operation"),
    chunk: arrays.bytes("chunk"),
    flags: arrays.bytes("flags"),
    lineFirst,
    lineTrack: arrays.integers("line_track"),
    lineDepth: arrays.integers("line_depth"),
    trackRank: arrays.integers("track_rank"),
    trackLane: arrays.bytes("track_lane"),
    trackOverflow: arrays.integers("track_overflow"),
    rank: arrays.integers("rank"),
    rankHost: arrays.integers("rank_host"),
    flows,
    flowLines: flows.map((slice) => lineOfSlice({ lineFirst }, slice)),
    steps: arrays.integers("steps"),
    stepBegin: arrays.doubles("step_begin"),
    stepEnd: arrays.doubles("step_end"),
  };
}

export function idealPicture(arrays: Arrays): IdealPicture {
  const fields = arrays.fields;
  const ideal = fields["ideal_s"];
  return {
    problem: String(fields["problem"] ?? ""),
    idealS: typeof ideal === "number" ? ideal : null,
    notes: arrays.texts("notes"),
    begin: arrays.doubles("begin"),
    length: arrays.doubles("length"),
    isCritical: arrays.bytes("is_critical"),
    steps: arrays.integers("steps"),
    replayedS: arrays.doubles("replayed_s"),
  };
}

/** Return the first slice of a line, from `first` to `last` (exclusive), that ends after a time; `last` if none does. */
export function firstEndingAfter(picture: TimelinePicture, first: number, last: number, ns: number): number {
  let low = first;
  let high = last;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((picture.begin[middle] as number) + (picture.length[middle] as number) > ns) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

/** Return the slice of a line at a time, else the nearest one within `slackNs`; -1: none. */
export function sliceAt(picture: TimelinePicture, line: number, ns: number, slackNs: number): number {
  const first = picture.lineFirst[line] ?? 0;
  const last = picture.lineFirst[line + 1] ?? first;
  const at = firstEndingAfter(picture, first, last, ns);
  if (at < last && (picture.begin[at] as number) <= ns) {
    return at;
  }
  const after = at < last ? (picture.begin[at] as number) - ns : Infinity;
  const before = at > first ? ns - (picture.begin[at - 1] as number) - (picture.length[at - 1] as number) : Infinity;
  if (Math.min(after, before) > slackNs) {
    return -1;
  }
  return after < before ? at : at - 1;
}

/** Return the line of a slice. */
export function lineOfSlice(picture: Pick<TimelinePicture, "lineFirst">, slice: number): number {
  let low = 0;
  let high = picture.lineFirst.length - 2;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if ((picture.lineFirst[middle] as number) <= slice) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

export function rankOfLine(picture: TimelinePicture, line: number): number {
  return picture.trackRank[picture.lineTrack[line] ?? 0] ?? 0;
}

export function operationName(picture: TimelinePicture, slice: number): string {
  const number = picture.operation[slice] ?? 0;
  return picture.operations[String(number)] ?? `operation-${number}`;
}

/** The placement of a line, in pixels from the top of all lines. */
export interface PlacedLine {
  line: number;
  top: number;
  height: number;
  isIdeal: boolean;
}

/** The placement of a rank's lines. */
export interface PlacedRank {
  rank: number;
  top: number;
  bottom: number;
}

export interface Placement {
  lines: PlacedLine[];
  /** By line of the picture, the placement of its measured slices. */
  ofLine: ReadonlyMap<number, PlacedLine>;
  ranks: PlacedRank[];
  height: number;
}

export const LINE_HEIGHT = 16;
export const IDEAL_HEIGHT = 6;
const LINE_GAP = 2;
const RANK_GAP = 12;
const RANK_HEAD = 16;

/** Return the placement of all lines: grouped by rank below the rank's name, with the ideal of a line directly below it. */
export function placeLines(picture: TimelinePicture, hasIdeal: (line: number) => boolean): Placement {
  const lines: PlacedLine[] = [];
  const ranks: PlacedRank[] = [];
  let top = 0;
  let current: PlacedRank | null = null;
  for (let line = 0; line < picture.lineTrack.length; line += 1) {
    const rank = rankOfLine(picture, line);
    if (current === null || current.rank !== rank) {
      top += current === null ? 0 : RANK_GAP;
      current = { rank, top, bottom: top };
      ranks.push(current);
      top += RANK_HEAD;
    }
    lines.push({ line, top, height: LINE_HEIGHT, isIdeal: false });
    top += LINE_HEIGHT;
    if (hasIdeal(line)) {
      lines.push({ line, top, height: IDEAL_HEIGHT, isIdeal: true });
      top += IDEAL_HEIGHT;
    }
    top += LINE_GAP;
    current.bottom = top;
  }
  const ofLine = new Map(lines.filter((one) => !one.isIdeal).map((one) => [one.line, one]));
  return { lines, ofLine, ranks, height: top };
}

/** Return 1 for each line that has a slice with an ideal. */
export function linesWithIdeal(picture: TimelinePicture, ideal: IdealPicture): Uint8Array {
  const has = new Uint8Array(picture.lineTrack.length);
  for (let line = 0; line < has.length; line += 1) {
    const last = picture.lineFirst[line + 1] ?? 0;
    for (let slice = picture.lineFirst[line] ?? 0; slice < last; slice += 1) {
      if ((ideal.length[slice] as number) >= 0) {
        has[line] = 1;
        break;
      }
    }
  }
  return has;
}
