// Draws a line of slices as one row of pixels, which is then stretched to the height of the line. This makes panning cheap: a
// hundred thousand slices become a few hundred rows of numbers, whatever the height of the screen.
//
// Of slices that share a pixel, the one with the greatest weight is drawn; colors are never mixed.

import { firstEndingAfter, type TimelinePicture } from "./timeline-picture.ts";

/** The visible span of time, and its width in pixels. */
export interface Span {
  fromNs: number;
  toNs: number;
  width: number;
}

/** Times and colors of slices: the measured ones, or their ideals. */
export interface StripSource {
  begin: Float64Array;
  length: Float64Array;
  /** By slice: of several slices in one pixel, the one with the greatest weight is drawn. */
  weight: Uint8Array;
  /** By slice: an index into the colors. */
  color: Uint8Array;
}

export interface Wide {
  slice: number;
  left: number;
  right: number;
}

const WIDE_PX = 3;

/**
 * Write the slices from `first` to `last` (exclusive) into a row of pixels. `colors` are pixels; `edges` are the same colors,
 * darker, for the first pixel of a wide slice, which separates it from its neighbor. Slices of at least `labelPx` pixels are
 * added to `wide`. Returns the number of visible slices.
 */
export function drawStrip(
  picture: TimelinePicture,
  source: StripSource,
  first: number,
  last: number,
  span: Span,
  row: Uint32Array,
  weights: Uint8Array,
  colors: Uint32Array,
  edges: Uint32Array,
  labelPx: number,
  wide: Wide[],
): number {
  row.fill(0);
  weights.fill(0);
  const scale = span.width / (span.toNs - span.fromNs);
  const isReal = source.begin === picture.begin;
  // The ideals of a line are not ordered by time, so all of them are checked.
  let slice = isReal ? firstEndingAfter(picture, first, last, span.fromNs) : first;
  let seen = 0;
  for (; slice < last; slice += 1) {
    const length = source.length[slice] as number;
    const begin = source.begin[slice] as number;
    if (begin >= span.toNs) {
      if (isReal) {
        break;
      }
      continue;
    }
    if (length < 0 || begin + length <= span.fromNs) {
      continue;
    }
    seen += 1;
    const left = Math.max(0, Math.floor((begin - span.fromNs) * scale));
    const right = Math.min(span.width, Math.max(left + 1, Math.floor((begin + length - span.fromNs) * scale)));
    const color = source.color[slice] as number;
    const weight = (source.weight[slice] as number) + 1;
    if (right - left === 1) {
      if (weight > (weights[left] as number)) {
        weights[left] = weight;
        row[left] = colors[color] as number;
      }
      continue;
    }
    for (let pixel = left; pixel < right; pixel += 1) {
      if (weight >= (weights[pixel] as number)) {
        weights[pixel] = weight;
        row[pixel] = colors[color] as number;
      }
    }
    if (right - left >= WIDE_PX && begin >= span.fromNs) {
      row[left] = edges[color] as number;
    }
    if (right - left >= labelPx) {
      wide.push({ slice, left, right });
    }
  }
  return seen;
}

/** Return a span moved by `byNs`, limited to the picture plus half a span at each end. */
export function panned(span: Span, byNs: number, endNs: number): Span {
  const length = span.toNs - span.fromNs;
  const slack = length * 0.5;
  const from = Math.min(Math.max(span.fromNs + byNs, -slack), Math.max(-slack, endNs - length + slack));
  return { ...span, fromNs: from, toNs: from + length };
}

const SHORTEST_NS = 200;

/** Return a span that is `factor` times as long, around a time that keeps its position. */
export function zoomed(span: Span, factor: number, aroundNs: number, endNs: number): Span {
  const length = span.toNs - span.fromNs;
  const next = Math.min(Math.max(length * factor, SHORTEST_NS), Math.max(endNs, SHORTEST_NS) * 1.5);
  const part = (aroundNs - span.fromNs) / length;
  const from = aroundNs - part * next;
  return { ...span, fromNs: from, toNs: from + next };
}
