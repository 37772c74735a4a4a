// The grid as data: the state of each rank and the position of its cell. Stages are columns and replicas are rows; ranks that
// share both are side by side.

import type { Arrays } from "./arrays.ts";
import { sizeOf, type Layout } from "./layout.ts";

export interface RankState {
  name: string;
  letter: string;
}

export interface RanksPicture {
  round: number;
  layout: Layout;
  shape: GridShape;
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
  /** NaN: unknown. */
  score: Float32Array;
  host: Int32Array;
  /** Pairs of ranks: the waiting one (the first of `arrowCount` ranks), and the one it waits for. */
  arrows: Int32Array;
  arrowKind: Uint8Array;
  arrowCount: Int32Array;
}

export function ranksPicture(arrays: Arrays): RanksPicture {
  const fields = arrays.fields;
  const layout = fields["layout"] as Layout;
  const state = arrays.bytes("state");
  return {
    round: Number(fields["round"]),
    layout,
    shape: shapeOf(layout),
    states: fields["states"] as RankState[],
    arrowKinds: arrays.texts("arrow_kinds"),
    operations: fields["operations"] as Record<string, string>,
    hosts: arrays.texts("hosts"),
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

/** The position of a cell in the grid. */
export interface Place {
  stage: number;
  replica: number;
  /** The index among the ranks of a stage and replica. */
  inner: number;
}

/** The number of cells in each direction. Rank numbers run over inner cells first, then replicas, then stages. */
export interface GridShape {
  stages: number;
  replicas: number;
  inner: number;
}

export function shapeOf(layout: Layout): GridShape {
  const stages = sizeOf(layout, "pp");
  const replicas = sizeOf(layout, "dp");
  return { stages, replicas, inner: layout.world_size / (stages * replicas) };
}

export function placeOfRank(shape: GridShape, rank: number): Place {
  return {
    inner: rank % shape.inner,
    replica: Math.floor(rank / shape.inner) % shape.replicas,
    stage: Math.floor(rank / (shape.inner * shape.replicas)),
  };
}

export function rankOfPlace(shape: GridShape, place: Place): number {
  return (place.stage * shape.replicas + place.replica) * shape.inner + place.inner;
}

/** The position and size of the grid on the screen. Cells are `cell` wide and `line` high, with a gap between stages. */
export interface GridView {
  cell: number;
  line: number;
  /** Position of the first cell's corner, in pixels. */
  x: number;
  y: number;
}

const MOST_GAP_PX = 28;
/** Cells of a small job fill the width of the page and are up to this high, so that they have room for text. */
const MOST_WHOLE_LINE = 240;
const MOST_ZOOMED = 144;

/** Return the gap between two stages: one cell, up to a limit. */
function gapOf(cell: number): number {
  return Math.min(cell, MOST_GAP_PX);
}

function stageWidth(shape: GridShape, cell: number): number {
  return shape.inner * cell + gapOf(cell);
}

/** Return the width of the grid in pixels. */
export function gridWidth(shape: GridShape, view: GridView): number {
  return shape.stages * stageWidth(shape, view.cell) - gapOf(view.cell);
}

/** Return the left edge of a cell in pixels. */
export function leftOf(shape: GridShape, view: GridView, place: Pick<Place, "stage" | "inner">): number {
  return view.x + place.stage * stageWidth(shape, view.cell) + place.inner * view.cell;
}

/** Return the view that shows the whole grid. */
export function wholeGrid(shape: GridShape, width: number, height: number): GridView {
  const columns = shape.stages * shape.inner;
  const gaps = shape.stages - 1;
  const small = width / (columns + gaps);
  const cell = small <= MOST_GAP_PX ? small : (width - gaps * MOST_GAP_PX) / columns;
  const line = Math.min(MOST_WHOLE_LINE, Math.max(height / shape.replicas, 0.25), cell * 2.2);
  return { cell, line, x: 0, y: 0 };
}

/** Return the rank at a point; -1: none. */
export function rankAt(shape: GridShape, view: GridView, x: number, y: number): number {
  const width = stageWidth(shape, view.cell);
  const stage = Math.floor((x - view.x) / width);
  const inner = Math.floor((x - view.x - stage * width) / view.cell);
  const replica = Math.floor((y - view.y) / view.line);
  if (stage < 0 || replica < 0 || replica >= shape.replicas || stage >= shape.stages || inner >= shape.inner) {
    return -1;
  }
  return rankOfPlace(shape, { stage, replica, inner });
}

/** Return the center of a rank's cell. */
export function centerOf(shape: GridShape, view: GridView, rank: number): { x: number; y: number } {
  const place = placeOfRank(shape, rank);
  return { x: leftOf(shape, view, place) + 0.5 * view.cell, y: view.y + (place.replica + 0.5) * view.line };
}

/** Return the view scaled around a fixed point, limited to between the whole grid and a maximum cell size. */
export function zoomedGrid(shape: GridShape, view: GridView, factor: number, x: number, y: number, whole: GridView): GridView {
  const cell = Math.min(Math.max(view.cell * factor, whole.cell), Math.max(MOST_ZOOMED, whole.cell));
  const by = cell / view.cell;
  const line = Math.min(Math.max(view.line * by, whole.line), Math.max(MOST_ZOOMED, whole.line));
  const width = stageWidth(shape, view.cell);
  const stage = Math.min(Math.max(0, Math.floor((x - view.x) / width)), shape.stages - 1);
  const within = (x - view.x - stage * width) * by;
  return { cell, line, x: x - stage * stageWidth(shape, cell) - within, y: y - ((y - view.y) * line) / view.line };
}

/** Return the view moved so that the grid fills the canvas where it is larger, and starts at the edge where it is smaller. */
export function clampedGrid(shape: GridShape, view: GridView, width: number, height: number): GridView {
  const across = gridWidth(shape, view);
  const down = view.line * shape.replicas;
  const keep = (at: number, size: number, room: number): number =>
    size <= room ? 0 : Math.min(0, Math.max(room - size, at));
  return { ...view, x: keep(view.x, across, width), y: keep(view.y, down, height) };
}

/** Return the rank that a key moves the cursor to. */
export function rankBeside(shape: GridShape, rank: number, key: string): number {
  const at = placeOfRank(shape, rank);
  const across = at.stage * shape.inner + at.inner;
  const most = shape.stages * shape.inner - 1;
  const moved: Record<string, [number, number]> = {
    ArrowLeft: [across - 1, at.replica],
    ArrowRight: [across + 1, at.replica],
    ArrowUp: [across, at.replica - 1],
    ArrowDown: [across, at.replica + 1],
    PageUp: [across, at.replica - 10],
    PageDown: [across, at.replica + 10],
    Home: [0, at.replica],
    End: [most, at.replica],
  };
  const next = moved[key];
  if (next === undefined) {
    return rank;
  }
  const column = Math.min(Math.max(0, next[0]), most);
  const replica = Math.min(Math.max(0, next[1]), shape.replicas - 1);
  return rankOfPlace(shape, { replica, stage: Math.floor(column / shape.inner), inner: column % shape.inner });
}

/** Numbers of the states that the page draws in a special way, as defined in megatrain_dashboard/api/ranks/picture_view.py. */
export const UNKNOWN = 0;
export const BEHIND = 2;
export const SILENT = 4;
export const OUTLIER = 5;
export const SUSPECT = 6;

const CARD_CELL_PX = 120;
const CARD_LINE_PX = 20;

/** Return whether cells are large enough for text. */
export function hasCards(view: GridView): boolean {
  return view.cell >= CARD_CELL_PX && view.line >= CARD_LINE_PX;
}
