// Draws the heat map: cells, labels of groups and rows at the left, steps below, and a bar at the right of rows with missing
// values. The cursor has a separate canvas, so that moving it does not redraw the cells.

import { packed, type Triple } from "./colors.ts";
import { heatPixels, poolHeat, showing, type HeatPicture, type HeatWindow } from "./heat-picture.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";
import { roundStep } from "./ticks.ts";

export interface HeatPlace {
  left: number;
  top: number;
  width: number;
  height: number;
}

export const GUTTER_LEFT = 132;
const GUTTER_RIGHT = 14;
const GUTTER_BOTTOM = 24;
const GUTTER_TOP = 8;
export const HEAT_FONT_PX = 12;
const ROW_LABEL_PX = 62;
const LEAST_GROUP_PX = 13;
const GAP_BAR = 4;

export interface HeatStyle {
  ink: string;
  inkFaint: string;
  line: string;
  mark: string;
  accent: string;
  nothing: Triple;
  weave: Triple;
  font: string;
  /** The label of a column: its step, or the end time of that step. */
  stepText: (step: number) => string;
}

/** Return the area of the cells on a canvas of this size. */
export function heatPlace(size: Size): HeatPlace {
  return {
    left: GUTTER_LEFT,
    top: GUTTER_TOP,
    width: Math.max(1, size.width - GUTTER_LEFT - GUTTER_RIGHT),
    height: Math.max(1, size.height - GUTTER_TOP - GUTTER_BOTTOM),
  };
}

/** Draw everything except the cursor. Returns the number of screen lines that have cells without a value. */
export function paintHeat(
  context: CanvasRenderingContext2D,
  scratch: HTMLCanvasElement,
  picture: HeatPicture,
  window: HeatWindow,
  size: Size,
  style: HeatStyle,
  table: Uint32Array,
): number {
  const place = heatPlace(size);
  context.clearRect(0, 0, size.width, size.height);
  const height = Math.round(place.height * size.ratio);
  const width = Math.round(place.width * size.ratio);
  const pooled = poolHeat(picture, window, height, width);
  const numGaps = pooled.hasGaps.reduce((sum, one) => sum + one, 0);
  if (pooled.width > 0 && pooled.height > 0) {
    const pixels = heatPixels(pooled, table, packed(style.nothing), packed(style.weave));
    scratch.width = pooled.width;
    scratch.height = pooled.height;
    const image = new ImageData(new Uint8ClampedArray(pixels.buffer as ArrayBuffer), pooled.width, pooled.height);
    scratch.getContext("2d")?.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(scratch, place.left, place.top, place.width, place.height);
    paintGaps(context, pooled.hasGaps, place, style);
  }
  paintRows(context, picture, window, place, style);
  paintSteps(context, picture, window, place, style);
  return numGaps;
}

function paintGaps(context: CanvasRenderingContext2D, hasGaps: Uint8Array, place: HeatPlace, style: HeatStyle): void {
  context.fillStyle = style.mark;
  const lineHeight = place.height / hasGaps.length;
  for (let line = 0; line < hasGaps.length; line += 1) {
    if (hasGaps[line] === 1) {
      context.fillRect(place.left + place.width + 4, place.top + line * lineHeight, GAP_BAR, Math.max(1, lineHeight));
    }
  }
}

/** Return the y coordinate at which a row begins. */
export function yOfRow(row: number, window: HeatWindow, place: HeatPlace): number {
  return place.top + ((row - window.top) * place.height) / Math.max(1, window.bottom - window.top);
}

export function xOfColumn(column: number, window: HeatWindow, place: HeatPlace): number {
  return place.left + ((column - window.left) * place.width) / Math.max(1, window.right - window.left);
}

/** Return the row and column at a point, which may be outside of the window. */
export function cellAt(x: number, y: number, window: HeatWindow, place: HeatPlace): { row: number; column: number } {
  return {
    row: window.top + Math.floor(((y - place.top) * (window.bottom - window.top)) / place.height),
    column: window.left + Math.floor(((x - place.left) * (window.right - window.left)) / place.width),
  };
}

/** Return the name of a row: its rank, or its host. */
export function rowName(picture: HeatPicture, row: number): string {
  if (picture.by === "host") {
    const host = picture.hosts[picture.rowHost[row] ?? 0] ?? "";
    return host === "" ? "unknown host" : host;
  }
  const rank = picture.rowRank[row] ?? 0;
  return picture.rowsPerBin > 1 ? `from rank ${rank}` : `rank ${rank}`;
}

function paintRows(
  context: CanvasRenderingContext2D, picture: HeatPicture, window: HeatWindow, place: HeatPlace, style: HeatStyle,
): void {
  context.font = style.font;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.lineWidth = 1;
  const rows = window.bottom - window.top;
  const rowHeight = place.height / Math.max(1, rows);
  const isNamed = picture.groupBegin.length > 0;
  paintGroups(context, picture, window, place, style);
  if (isNamed && rowHeight < LEAST_GROUP_PX) {
    return;
  }
  const step = rowHeight >= LEAST_GROUP_PX ? 1 : roundStep(rows, place.height / 26);
  const room = isNamed ? ROW_LABEL_PX : GUTTER_LEFT - 12;
  context.textAlign = "right";
  for (let row = Math.ceil(window.top / step) * step; row < window.bottom; row += step) {
    const middle = yOfRow(row + 0.5, window, place);
    context.fillStyle = style.inkFaint;
    context.fillText(cutText(context, rowName(picture, row), room), place.left - 8, middle);
  }
}

/** Draw lines between groups, and group names where they fit. */
function paintGroups(
  context: CanvasRenderingContext2D, picture: HeatPicture, window: HeatWindow, place: HeatPlace, style: HeatStyle,
): void {
  const groups = picture.groupBegin;
  const rowHeight = place.height / Math.max(1, window.bottom - window.top);
  const isBesideRows = rowHeight >= LEAST_GROUP_PX;
  let free = -Infinity;
  for (let group = 0; group < groups.length; group += 1) {
    const begin = Math.max(groups[group] as number, window.top);
    const end = Math.min(groups[group + 1] ?? picture.numRows, window.bottom);
    if (end <= begin) {
      continue;
    }
    const top = yOfRow(begin, window, place);
    const bottom = yOfRow(end, window, place);
    context.strokeStyle = style.line;
    if (begin > window.top && bottom - top >= 3) {
      strokeLine(context, isBesideRows ? 0 : place.left - 6, top, place.left + place.width, top);
    }
    const middle = isBesideRows ? top + rowHeight / 2 : (top + bottom) / 2;
    if (middle - free >= LEAST_GROUP_PX && bottom - top >= 6) {
      context.fillStyle = style.ink;
      context.textAlign = isBesideRows ? "left" : "right";
      const room = isBesideRows ? GUTTER_LEFT - ROW_LABEL_PX - 14 : GUTTER_LEFT - 12;
      const text = cutText(context, picture.groupLabels[group] ?? "", room);
      context.fillText(text, isBesideRows ? 2 : place.left - 8, middle);
      free = middle;
    }
  }
}

function paintSteps(
  context: CanvasRenderingContext2D, picture: HeatPicture, window: HeatWindow, place: HeatPlace, style: HeatStyle,
): void {
  const bottom = place.top + place.height;
  context.font = style.font;
  context.textBaseline = "top";
  context.textAlign = "center";
  context.fillStyle = style.inkFaint;
  context.strokeStyle = style.line;
  const first = picture.columnStep[window.left] ?? 0;
  const columns = window.right - window.left;
  const steps = columns * picture.stepsPerBin;
  const every = Math.max(picture.stepsPerBin, roundStep(steps, place.width / 72));
  for (let step = Math.ceil(first / every) * every; step < first + steps; step += every) {
    const column = window.left + (step - first) / picture.stepsPerBin;
    const middle = xOfColumn(column + 0.5 / picture.stepsPerBin, window, place);
    strokeLine(context, middle, bottom, middle, bottom + 4);
    context.fillText(style.stepText(step), Math.min(middle, place.left + place.width - 12), bottom + 7);
  }
}

export function strokeLine(context: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number): void {
  context.beginPath();
  context.moveTo(Math.round(x0) + 0.5, Math.round(y0) + 0.5);
  context.lineTo(Math.round(x1) + 0.5, Math.round(y1) + 0.5);
  context.stroke();
}

export interface HeatCursor {
  row: number;
  column: number;
}

/** Draw the cursor and the current selection, on a canvas above the cells. */
export function paintHeatCursor(
  context: CanvasRenderingContext2D,
  window: HeatWindow,
  size: Size,
  cursor: HeatCursor | null,
  drag: { x0: number; y0: number; x1: number; y1: number } | null,
  style: HeatStyle,
): void {
  const place = heatPlace(size);
  context.clearRect(0, 0, size.width, size.height);
  if (cursor !== null && cursor.row >= window.top && cursor.row < window.bottom
      && cursor.column >= window.left && cursor.column < window.right) {
    const left = xOfColumn(cursor.column, window, place);
    const right = xOfColumn(cursor.column + 1, window, place);
    const top = yOfRow(cursor.row, window, place);
    const bottom = yOfRow(cursor.row + 1, window, place);
    const y = (top + bottom) / 2;
    const x = (left + right) / 2;
    context.strokeStyle = style.accent;
    context.lineWidth = 1;
    context.setLineDash([3, 3]);
    strokeLine(context, place.left, y, Math.max(place.left, left - 4), y);
    strokeLine(context, Math.min(place.left + place.width, right + 4), y, place.left + place.width, y);
    strokeLine(context, x, place.top, x, Math.max(place.top, top - 4));
    strokeLine(context, x, Math.min(place.top + place.height, bottom + 4), x, place.top + place.height);
    context.setLineDash([]);
    const width = Math.max(7, right - left);
    const height = Math.max(7, bottom - top);
    context.lineWidth = 3;
    context.strokeStyle = "#ffffff";
    context.strokeRect(x - width / 2, y - height / 2, width, height);
    context.lineWidth = 1.5;
    context.strokeStyle = "#000000";
    context.strokeRect(x - width / 2, y - height / 2, width, height);
  }
  if (drag !== null) {
    const x = Math.min(drag.x0, drag.x1);
    const y = Math.min(drag.y0, drag.y1);
    context.fillStyle = style.accent;
    context.globalAlpha = 0.18;
    context.fillRect(x, y, Math.abs(drag.x1 - drag.x0), Math.abs(drag.y1 - drag.y0));
    context.globalAlpha = 1;
    context.strokeStyle = style.accent;
    context.lineWidth = 1;
    context.strokeRect(x + 0.5, y + 0.5, Math.abs(drag.x1 - drag.x0), Math.abs(drag.y1 - drag.y0));
  }
}

/** Return the cell that is shown at a point; null outside of the cells. */
export function cellSeenAt(
  picture: HeatPicture, x: number, y: number, window: HeatWindow, size: Size,
): HeatCursor | null {
  const place = heatPlace(size);
  if (x < place.left || x >= place.left + place.width || y < place.top || y >= place.top + place.height) {
    return null;
  }
  const lines = Math.min(window.bottom - window.top, Math.round(place.height * size.ratio));
  const places = Math.min(window.right - window.left, Math.round(place.width * size.ratio));
  const line = Math.floor(((y - place.top) * lines) / place.height);
  const across = Math.floor(((x - place.left) * places) / place.width);
  const rows = window.bottom - window.top;
  const columns = window.right - window.left;
  return showing(
    picture,
    window.top + Math.floor((line * rows) / lines),
    window.top + Math.floor(((line + 1) * rows) / lines),
    window.left + Math.floor((across * columns) / places),
    window.left + Math.floor(((across + 1) * columns) / places),
  );
}
