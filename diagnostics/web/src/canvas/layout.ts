// The place of a rank: the axes of a layout as the server lists them, and coordinates along them.

import type { LayoutDocument } from "../api/documents.ts";

export type Layout = LayoutDocument;

/** Return the number of ranks along an axis; 1 if the layout does not list it. */
export function sizeOf(layout: Layout, axis: string): number {
  return layout.axes.find((one) => one.name === axis)?.size ?? 1;
}

/** Return a rank's place on each axis, in the order of the layout's list. */
export function placeOf(layout: Layout, rank: number): Record<string, number> {
  return Object.fromEntries(layout.axes.map((one) => [one.name, Math.floor(rank / one.stride) % one.size]));
}

/** Return a place as "pp 0 dp 1 tp 3". */
export function placeText(place: Readonly<Record<string, number>>, between = " "): string {
  return Object.entries(place).map(([axis, index]) => `${axis} ${index}`).join(between);
}

/** Return "pp dp tp", the heading of columns of places. */
export function axesText(layout: Layout): string {
  return layout.axes.map((one) => one.name).join(" ");
}

/** Return the ranks that share a group with a rank, by axis. */
export function peersOf(layout: Layout, rank: number): Record<string, number[]> {
  return Object.fromEntries(
    layout.axes.map((one) => {
      const first = rank - (Math.floor(rank / one.stride) % one.size) * one.stride;
      return [one.name, Array.from({ length: one.size }, (_, index) => first + index * one.stride)];
    }),
  );
}
