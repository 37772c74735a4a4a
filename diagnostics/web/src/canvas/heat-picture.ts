// The heat map as data: the received picture, its visible part, and that part scaled to the screen.
//
// Rows or columns that share a pixel show their maximum, so one bad rank of 12,288 stays as visible as it is alone. A mean would
// hide it, and skipping rows could drop it.

import type { Arrays } from "./arrays.ts";
import type { Layout } from "./layout.ts";

export interface HeatPicture {
  round: number;
  layout: Layout;
  operation: string;
  measure: string;
  unit: string;
  scale: string;
  by: string;
  sort: string;
  firstStep: number;
  lastStep: number;
  rowsPerBin: number;
  stepsPerBin: number;
  low: number;
  high: number;
  least: number;
  greatest: number;
  noValue: number;
  numLevels: number;
  hosts: readonly string[];
  groupLabels: readonly string[];
  numRows: number;
  numColumns: number;
  /** One level per cell, row by row; `noValue` where the value is unknown. */
  cells: Uint8Array;
  rowRank: Int32Array;
  rowHost: Int32Array;
  columnStep: Int32Array;
  groupBegin: Int32Array;
}

export function heatPicture(arrays: Arrays): HeatPicture {
  const fields = arrays.fields;
  const layout = fields["layout"] as Layout;
  const shape = arrays.shape("cells");
  return {
    round: Number(fields["round"]),
    layout,
    operation: String(fields["operation"]),
    measure: String(fields["measure"]),
    unit: String(fields["unit"]),
    scale: String(fields["scale"]),
    by: String(fields["by"]),
    sort: String(fields["sort"]),
    firstStep: Number(fields["first_step"]),
    lastStep: Number(fields["last_step"]),
    rowsPerBin: Number(fields["rows_per_bin"]),
    stepsPerBin: Number(fields["steps_per_bin"]),
    low: Number(fields["low"]),
    high: Number(fields["high"]),
    least: Number(fields["least"]),
    greatest: Number(fields["greatest"]),
    noValue: Number(fields["no_value"]),
    numLevels: Number(fields["num_levels"]),
    hosts: arrays.texts("hosts"),
    groupLabels: arrays.texts("group_labels"),
    numRows: shape[0] ?? 0,
    numColumns: shape[1] ?? 0,
    cells: arrays.bytes("cells"),
    rowRank: arrays.integers("row_rank"),
    rowHost: arrays.integers("row_host"),
    columnStep: arrays.integers("column_step"),
    groupBegin: arrays.integers("group_begin"),
  };
}

/** The visible part of a picture: rows and columns, with exclusive ends. */
export interface HeatWindow {
  top: number;
  bottom: number;
  left: number;
  right: number;
}

/** Return the steps of a window's columns, with inclusive ends. */
export function stepsOf(picture: HeatPicture, window: HeatWindow): { from: number; to: number } {
  return {
    from: picture.firstStep + window.left * picture.stepsPerBin,
    to: Math.min(picture.lastStep, picture.firstStep + window.right * picture.stepsPerBin - 1),
  };
}

export interface Pooled {
  /** 0: no value, else level + 1. */
  levels: Uint8Array;
  /** By line: 1 if any of its cells has no value. */
  hasGaps: Uint8Array;
  width: number;
  height: number;
}

/** Return the window scaled to at most `height` x `width`, with the maximum level of the cells that share a pixel. */
export function poolHeat(picture: HeatPicture, window: HeatWindow, height: number, width: number): Pooled {
  const { cells, numColumns, noValue } = picture;
  const rows = window.bottom - window.top;
  const columns = window.right - window.left;
  const lines = Math.max(0, Math.min(rows, height));
  const places = Math.max(0, Math.min(columns, width));
  const levels = new Uint8Array(lines * places);
  const hasGaps = new Uint8Array(lines);
  // The target column of each column, the same for all rows.
  const placeOf = Int32Array.from({ length: columns }, (_, column) => Math.floor((column * places) / columns));
  for (let line = 0; line < lines; line += 1) {
    const first = window.top + Math.floor((line * rows) / lines);
    const last = window.top + Math.floor(((line + 1) * rows) / lines);
    const at = line * places;
    let gaps = 0;
    for (let row = first; row < last; row += 1) {
      const begin = row * numColumns + window.left;
      for (let column = 0; column < columns; column += 1) {
        const code = cells[begin + column] as number;
        if (code === noValue) {
          gaps = 1;
          continue;
        }
        const place = at + (placeOf[column] as number);
        if (code >= (levels[place] as number)) {
          levels[place] = code + 1;
        }
      }
    }
    hasGaps[line] = gaps;
  }
  return { levels, hasGaps, width: places, height: lines };
}

/** Return the pixels of pooled levels; cells without a value are a checkerboard of two colors. */
export function heatPixels(pooled: Pooled, table: Uint32Array, nothing: number, weave: number): Uint32Array {
  const { levels, width, height } = pooled;
  const pixels = new Uint32Array(width * height);
  for (let line = 0; line < height; line += 1) {
    for (let place = 0; place < width; place += 1) {
      const at = line * width + place;
      const level = levels[at] as number;
      pixels[at] = level === 0 ? ((line + place) % 2 === 0 ? nothing : weave) : (table[level - 1] as number);
    }
  }
  return pixels;
}

/** Return the whole picture as a window. */
export function wholeWindow(picture: HeatPicture): HeatWindow {
  return { top: 0, bottom: picture.numRows, left: 0, right: picture.numColumns };
}

/** Return a window limited to the picture, with at least one row and one column. */
export function clampedWindow(picture: HeatPicture, window: HeatWindow): HeatWindow {
  const top = Math.min(Math.max(0, Math.floor(window.top)), Math.max(0, picture.numRows - 1));
  const left = Math.min(Math.max(0, Math.floor(window.left)), Math.max(0, picture.numColumns - 1));
  return {
    top,
    left,
    bottom: Math.min(Math.max(top + 1, Math.ceil(window.bottom)), picture.numRows),
    right: Math.min(Math.max(left + 1, Math.ceil(window.right)), picture.numColumns),
  };
}

/** Return the column that contains a step; -1: none. */
export function columnOfStep(picture: HeatPicture, step: number): number {
  const column = Math.floor((step - picture.firstStep) / Math.max(1, picture.stepsPerBin));
  return step >= picture.firstStep && column < picture.numColumns ? column : -1;
}

/** Return the row whose first rank is `rank` (a row of a host, or of binned ranks, has several); -1: none. */
export function rowOfRank(picture: HeatPicture, rank: number): number {
  return picture.rowRank.indexOf(rank);
}

function isContinued(old: HeatPicture, next: HeatPicture): boolean {
  const same = ["round", "operation", "measure", "scale", "by", "sort", "low", "high", "numRows"] as const;
  return same.every((name) => old[name] === next[name])
    && old.stepsPerBin === 1 && next.stepsPerBin === 1
    && next.firstStep > old.firstStep && next.firstStep <= old.lastStep + 1
    && old.rowRank.every((rank, row) => rank === next.rowRank[row]);
}

/**
 * Return `old` with the columns of `next` replacing and extending its last ones, limited to the newest `most` columns. Null if
 * `next` does not continue `old`; then the whole picture must be read again.
 */
export function continued(old: HeatPicture, next: HeatPicture, most: number): HeatPicture | null {
  if (!isContinued(old, next)) {
    return null;
  }
  const kept = next.firstStep - old.firstStep;
  const all = kept + next.numColumns;
  const dropped = Math.max(0, all - most);
  const from = Math.min(dropped, kept);
  const fromNext = dropped - from;
  const width = all - dropped;
  const cells = new Uint8Array(old.numRows * width);
  for (let row = 0; row < old.numRows; row += 1) {
    const begin = row * old.numColumns;
    cells.set(old.cells.subarray(begin + from, begin + kept), row * width);
    const other = row * next.numColumns;
    cells.set(next.cells.subarray(other + fromNext, other + next.numColumns), row * width + kept - from);
  }
  const firstStep = old.firstStep + dropped;
  return {
    ...old,
    firstStep,
    lastStep: next.lastStep,
    least: Math.min(old.least, next.least),
    greatest: Math.max(old.greatest, next.greatest),
    numColumns: width,
    cells,
    columnStep: Int32Array.from({ length: width }, (_, column) => firstStep + column),
  };
}

/** Return the cell that a pixel shows if several rows and columns share it: the one with the maximum level. */
export function showing(
  picture: HeatPicture, firstRow: number, lastRow: number, firstColumn: number, lastColumn: number,
): { row: number; column: number } {
  let best = { row: firstRow, column: firstColumn };
  let greatest = -1;
  for (let row = firstRow; row < lastRow; row += 1) {
    for (let column = firstColumn; column < lastColumn; column += 1) {
      const code = picture.cells[row * picture.numColumns + column] ?? picture.noValue;
      if (code !== picture.noValue && code > greatest) {
        greatest = code;
        best = { row, column };
      }
    }
  }
  return best;
}
