// The 3D grid as data: what is known of each rank, and where its cell stands: pp columns, dp rows, tp cells in each.

import type { Arrays } from "./arrays.ts";
import type { Layout } from "./heat-picture.ts";

export interface RankState {
  name: string;
  letter: string;
}

export interface GridPicture {
  round: number;
  layout: Layout;
  states: readonly RankState[];
  arrowKinds: readonly string[];
  operations: Readonly<Record<string, string>>;
  hosts: readonly string[];
  newestStep: number;
  hasHang: boolean;
  hangReason: string;
  hangSource: string;
  hasScores: boolean;
  numRanks: number;
  state: Uint8Array;
  step: Int32Array;
  operation: Uint8Array;
  /** NaN: not known. */
  score: Float32Array;
  host: Int32Array;
  /** Pairs: who waits (the first of `arrowCount`), and for whom. */
  arrows: Int32Array;
  arrowKind: Uint8Array;
  arrowCount: Int32Array;
}

export function gridPicture(arrays: Arrays): GridPicture {
  const fields = arrays.fields;
  const state = arrays.bytes("state");
  return {
    round: Number(fields["round"]),
    layout: fields["layout"] as Layout,
    states: fields["states"] as RankState[],
    arrowKinds: fields["arrow_kinds"] as string[],
    operations: fields["operations"] as Record<string, string>,
    hosts: fields["hosts"] as string[],
    newestStep: Number(fields["newest_step"]),
    hasHang: fields["has_hang"] === true,
    hangReason: String(fields["hang_reason"] ?? ""),
    hangSource: String(fields["hang_source"] ?? ""),
    hasScores: fields["has_scores"] === true,
    numRanks: state.length,
    state,
    step: arrays.integers("step"),
    operation: arrays.bytes("operation"),
    score: arrays.singles("score"),
    host: arrays.integers("host"),
    arrows: arrays.integers("arrows"),
    arrowKind: arrays.bytes("arrow_kind"),
    arrowCount: arrays.integers("arrow_count"),
  };
}

export interface Place {
  dp: number;
  pp: number;
  tp: number;
}

/** rank = (pp * dp_size + dp) * tp_size + tp, as everywhere in megatrain. */
export function placeOfRank(layout: Layout, rank: number): Place {
  return {
    tp: rank % layout.tp_size,
    dp: Math.floor(rank / layout.tp_size) % layout.dp_size,
    pp: Math.floor(rank / (layout.tp_size * layout.dp_size)),
  };
}

export function rankOfPlace(layout: Layout, place: Place): number {
  return (place.pp * layout.dp_size + place.dp) * layout.tp_size + place.tp;
}

/** The ranks that share a group with a rank, by kind of group. */
export function peersOfRank(layout: Layout, rank: number): { tp: number[]; dp: number[]; pp: number[] } {
  const at = placeOfRank(layout, rank);
  const of = (size: number, make: (index: number) => Place): number[] =>
    Array.from({ length: size }, (_, index) => rankOfPlace(layout, make(index)));
  return {
    tp: of(layout.tp_size, (tp) => ({ ...at, tp })),
    dp: of(layout.dp_size, (dp) => ({ ...at, dp })),
    pp: of(layout.pp_size, (pp) => ({ ...at, pp })),
  };
}

/** How the grid lies on the screen. Cells are `cell` wide and `line` high; stages have a gap between them. */
export interface GridView {
  cell: number;
  line: number;
  /** Of the first cell's corner, in pixels. */
  x: number;
  y: number;
}

const MOST_GAP_PX = 28;
/** Cells of a small job are as wide as the page, and up to this high: they have room for words. */
const MOST_WHOLE_LINE = 240;
const MOST_ZOOMED = 144;

/** Between two stages: as wide as a cell while cells are small. */
function gapOf(cell: number): number {
  return Math.min(cell, MOST_GAP_PX);
}

function stageWidth(layout: Layout, cell: number): number {
  return layout.tp_size * cell + gapOf(cell);
}

/** Return how wide the grid is, in pixels. */
export function gridWidth(layout: Layout, view: GridView): number {
  return layout.pp_size * stageWidth(layout, view.cell) - gapOf(view.cell);
}

/** Return where a place's cell begins, in pixels. */
export function leftOf(layout: Layout, view: GridView, place: Pick<Place, "pp" | "tp">): number {
  return view.x + place.pp * stageWidth(layout, view.cell) + place.tp * view.cell;
}

/** Return the view that shows the whole grid. */
export function wholeGrid(layout: Layout, width: number, height: number): GridView {
  const columns = layout.pp_size * layout.tp_size;
  const gaps = layout.pp_size - 1;
  const small = width / (columns + gaps);
  const cell = small <= MOST_GAP_PX ? small : (width - gaps * MOST_GAP_PX) / columns;
  const line = Math.min(MOST_WHOLE_LINE, Math.max(height / layout.dp_size, 0.25), cell * 2.2);
  return { cell, line, x: 0, y: 0 };
}

/** Return the rank at a point; -1: none. */
export function rankAt(layout: Layout, view: GridView, x: number, y: number): number {
  const stage = stageWidth(layout, view.cell);
  const pp = Math.floor((x - view.x) / stage);
  const tp = Math.floor((x - view.x - pp * stage) / view.cell);
  const dp = Math.floor((y - view.y) / view.line);
  if (pp < 0 || dp < 0 || dp >= layout.dp_size || pp >= layout.pp_size || tp >= layout.tp_size) {
    return -1;
  }
  return rankOfPlace(layout, { dp, pp, tp });
}

/** Return where the middle of a rank's cell is. */
export function centreOf(layout: Layout, view: GridView, rank: number): { x: number; y: number } {
  const place = placeOfRank(layout, rank);
  return { x: leftOf(layout, view, place) + 0.5 * view.cell, y: view.y + (place.dp + 0.5) * view.line };
}

/** Return the view at another size with a point staying where it is, neither smaller than the whole nor huge. */
export function zoomedGrid(layout: Layout, view: GridView, factor: number, x: number, y: number, whole: GridView): GridView {
  const cell = Math.min(Math.max(view.cell * factor, whole.cell), Math.max(MOST_ZOOMED, whole.cell));
  const by = cell / view.cell;
  const line = Math.min(Math.max(view.line * by, whole.line), Math.max(MOST_ZOOMED, whole.line));
  const stage = stageWidth(layout, view.cell);
  const pp = Math.min(Math.max(0, Math.floor((x - view.x) / stage)), layout.pp_size - 1);
  const within = (x - view.x - pp * stage) * by;
  return { cell, line, x: x - pp * stageWidth(layout, cell) - within, y: y - ((y - view.y) * line) / view.line };
}

/** Return the view moved so that part of the grid is always in sight. */
export function clampedGrid(layout: Layout, view: GridView, width: number, height: number): GridView {
  const across = gridWidth(layout, view);
  const down = view.line * layout.dp_size;
  const keep = (at: number, size: number, room: number): number =>
    size <= room ? 0 : Math.min(0, Math.max(room - size, at));
  return { ...view, x: keep(view.x, across, width), y: keep(view.y, down, height) };
}

/** Return the rank that a key leads to from another. */
export function rankBeside(layout: Layout, rank: number, key: string): number {
  const at = placeOfRank(layout, rank);
  const across = at.pp * layout.tp_size + at.tp;
  const most = layout.pp_size * layout.tp_size - 1;
  const moved: Record<string, [number, number]> = {
    ArrowLeft: [across - 1, at.dp],
    ArrowRight: [across + 1, at.dp],
    ArrowUp: [across, at.dp - 1],
    ArrowDown: [across, at.dp + 1],
    PageUp: [across, at.dp - 10],
    PageDown: [across, at.dp + 10],
    Home: [0, at.dp],
    End: [most, at.dp],
  };
  const next = moved[key];
  if (next === undefined) {
    return rank;
  }
  const column = Math.min(Math.max(0, next[0]), most);
  const dp = Math.min(Math.max(0, next[1]), layout.dp_size - 1);
  return rankOfPlace(layout, { dp, pp: Math.floor(column / layout.tp_size), tp: column % layout.tp_size });
}

/** Numbers of the states, as dashboard/pages/ranks/grid_view.py has them. */
export const UNHEARD = 0;
export const IN_STEP = 1;
export const BEHIND = 2;
export const WAITS = 3;
export const SILENT = 4;
export const OUTLIER = 5;
export const SUSPECT = 6;

const CARD_CELL_PX = 120;
const CARD_LINE_PX = 20;

/** Say whether cells are so large that words stand in them. */
export function hasCards(view: GridView): boolean {
  return view.cell >= CARD_CELL_PX && view.line >= CARD_LINE_PX;
}
