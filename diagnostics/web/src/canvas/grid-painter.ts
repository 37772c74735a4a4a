// The 3D grid on its canvas: a pixel a rank, stretched to cells, then letters, and what stands on them. Who is to blame is a
// shape with a name beside it, at any size; colour only repeats it.

import { againstPeers, cssOf, inkOn, operationColour, packed, sequential, type Theme, type Triple } from "./colours.ts";
import { paintArrows, paintGridCursor, paintMarks, paintPeers, type GridScene, type GridStyle } from "./grid-marks.ts";
import {
  hasCards, leftOf, placeOfRank, UNHEARD, type GridPicture, type GridView,
} from "./grid-picture.ts";
import type { Layout } from "./heat-picture.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";

export type GridColour = "state" | "step" | "operation" | "score";

export const GRID_TOP = 24;
export const GRID_LEFT = 54;
export const GRID_FONT_PX = 12;
const LETTER_PX = 13;
/** A cell of this size has its rank's number, too, so far below its top. */
const NUMBERED_PX = 60;
const NUMBER_TOP_PX = 12;
/** In a lower one that is as wide as this, the number stands before the letter. */
const NUMBERED_WIDE_PX = 48;
const TOP_SCORE = 6;

const STATE_COLOURS: Record<Theme, readonly Triple[]> = {
  light: [[226, 226, 222], [183, 203, 232], [236, 200, 120], [201, 184, 222], [120, 124, 130], [224, 140, 70], [190, 40, 34]],
  dark: [[44, 46, 51], [54, 86, 132], [150, 112, 34], [96, 78, 128], [150, 155, 162], [206, 120, 48], [255, 120, 110]],
};

/** Return the colour of a state by its number. */
export function stateColour(state: number, theme: Theme): Triple {
  return STATE_COLOURS[theme][state] ?? [128, 128, 128];
}

/** Return the colour of each rank. */
export function rankColours(picture: GridPicture, by: GridColour, theme: Theme): Triple[] {
  const least = by === "step" ? leastStep(picture) : 0;
  const width = Math.max(1, picture.newestStep - least);
  const unknown = stateColour(UNHEARD, theme);
  return Array.from({ length: picture.numRanks }, (_, rank) => {
    if (by === "operation") {
      const name = picture.operations[String(picture.operation[rank])];
      return name === undefined ? unknown : operationColour(name, theme);
    }
    if (by === "step") {
      const step = picture.step[rank] ?? -1;
      return step < 0 ? unknown : sequential((step - least) / width);
    }
    if (by === "score") {
      const score = picture.score[rank] ?? Number.NaN;
      return Number.isNaN(score) ? unknown : againstPeers(Math.max(0, score) / TOP_SCORE, theme);
    }
    return stateColour(picture.state[rank] ?? UNHEARD, theme);
  });
}

/** Return the least step that a rank has reported. */
export function leastStep(picture: GridPicture): number {
  let least = picture.newestStep;
  for (const step of picture.step) {
    if (step >= 0 && step < least) {
      least = step;
    }
  }
  return least;
}

/** Return the grid as an image of one pixel a rank, stage beside stage. */
export function gridImage(layout: Layout, colours: readonly Triple[]): { pixels: Uint32Array; width: number; height: number } {
  const width = layout.pp_size * layout.tp_size;
  const pixels = new Uint32Array(width * layout.dp_size);
  colours.forEach((colour, rank) => {
    const place = placeOfRank(layout, rank);
    pixels[place.dp * width + place.pp * layout.tp_size + place.tp] = packed(colour);
  });
  return { pixels, width, height: layout.dp_size };
}

export interface GridPainted {
  numArrows: number;
  numLetters: number;
  numCards: number;
  numMarks: number;
}

export function paintGridPicture(
  context: CanvasRenderingContext2D, scene: GridScene, view: GridView, size: Size, style: GridStyle,
): GridPainted {
  const { picture } = scene;
  const { layout } = picture;
  context.clearRect(0, 0, size.width, size.height);
  const width = size.width - GRID_LEFT;
  const height = size.height - GRID_TOP;
  context.save();
  context.beginPath();
  context.rect(GRID_LEFT, GRID_TOP, width, height);
  context.clip();
  context.translate(GRID_LEFT, GRID_TOP);
  context.imageSmoothingEnabled = false;
  const across = layout.tp_size * view.cell;
  for (let pp = 0; pp < layout.pp_size; pp += 1) {
    const from = pp * layout.tp_size;
    const left = leftOf(layout, view, { pp, tp: 0 });
    context.drawImage(
      scene.image, from, 0, layout.tp_size, layout.dp_size, left, view.y, across, layout.dp_size * view.line,
    );
  }
  paintGaps(context, layout, view, width, height, style);
  const numCards = hasCards(view) ? paintCards(context, scene, view, width, height, style) : 0;
  const numLetters = numCards === 0 ? paintLetters(context, scene, view, width, height, style) : 0;
  paintPeers(context, scene, view, style);
  const numArrows = scene.hasArrows ? paintArrows(context, scene, view, style) : 0;
  const numMarks = paintMarks(context, scene, view, width, height, style);
  paintGridCursor(context, scene, view, style);
  context.restore();
  paintHeads(context, layout, view, size, style);
  return { numArrows, numLetters, numCards, numMarks };
}

const LEAST_GAP_PX = 6;

function paintGaps(
  context: CanvasRenderingContext2D, layout: Layout, view: GridView, width: number, height: number, style: GridStyle,
): void {
  context.fillStyle = cssOf(style.background);
  const down = Math.min(height, view.y + layout.dp_size * view.line);
  const top = Math.max(0, view.y);
  if (view.cell >= LEAST_GAP_PX) {
    for (let column = 0; column < layout.pp_size * layout.tp_size; column += 1) {
      const x = leftOf(layout, view, { pp: Math.floor(column / layout.tp_size), tp: column % layout.tp_size });
      if (x > -view.cell && x < width) {
        context.fillRect(x, top, 1, down - top);
      }
    }
  }
  if (view.line >= LEAST_GAP_PX) {
    for (let dp = 0; dp <= layout.dp_size; dp += 1) {
      const y = view.y + dp * view.line;
      if (y >= 0 && y < height) {
        context.fillRect(0, y, width, 1);
      }
    }
  }
}

function eachInSight(
  layout: Layout, view: GridView, width: number, height: number, visit: (rank: number, x: number, y: number) => void,
): void {
  const firstDp = Math.max(0, Math.floor(-view.y / view.line));
  const lastDp = Math.min(layout.dp_size, Math.ceil((height - view.y) / view.line));
  for (let dp = firstDp; dp < lastDp; dp += 1) {
    for (let pp = 0; pp < layout.pp_size; pp += 1) {
      for (let tp = 0; tp < layout.tp_size; tp += 1) {
        const x = leftOf(layout, view, { pp, tp });
        if (x > -view.cell && x < width) {
          visit((pp * layout.dp_size + dp) * layout.tp_size + tp, x, view.y + dp * view.line);
        }
      }
    }
  }
}

function paintLetters(
  context: CanvasRenderingContext2D, scene: GridScene, view: GridView, width: number, height: number, style: GridStyle,
): number {
  if (view.cell < LETTER_PX || view.line < LETTER_PX) {
    return 0;
  }
  const { picture } = scene;
  context.font = style.font;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const hasNumbers = Math.min(view.cell, view.line) >= NUMBERED_PX;
  const isWide = !hasNumbers && view.cell >= NUMBERED_WIDE_PX;
  let drawn = 0;
  eachInSight(picture.layout, view, width, height, (rank, x, y) => {
    const letter = picture.states[picture.state[rank] ?? 0]?.letter ?? "";
    context.fillStyle = cssOf(inkOn(scene.colours[rank] ?? [128, 128, 128]));
    const text = isWide ? `${rank} ${letter}`.trim() : letter;
    context.fillText(text, x + view.cell / 2, y + view.line / 2);
    if (hasNumbers) {
      context.fillText(String(rank), x + view.cell / 2, y + NUMBER_TOP_PX);
    }
    drawn += text === "" && !hasNumbers ? 0 : 1;
  });
  return drawn;
}

const CARD_LINE_PX = 20;
const CARD_PAD_PX = 12;
const CARD_FONT_PX = 14;
/** In one line there is room for so much: rank, state and host. */
const MOST_IN_A_LINE = 3;

/** In cells that have room for it, what a rank is and does in words. */
function paintCards(
  context: CanvasRenderingContext2D, scene: GridScene, view: GridView, width: number, height: number, style: GridStyle,
): number {
  const { picture } = scene;
  context.textAlign = "left";
  context.textBaseline = "middle";
  const scale = Number.parseFloat(style.font) / GRID_FONT_PX; // of the page's text
  const font = style.font.replace(/^[\d.]+px/, `${CARD_FONT_PX * scale}px`);
  const high = Math.min(CARD_LINE_PX * scale, view.line);
  const most = Math.max(1, Math.floor((view.line - CARD_PAD_PX) / high));
  const above = Math.min(CARD_PAD_PX, (view.line - most * high) / 2);
  let drawn = 0;
  eachInSight(picture.layout, view, width, height, (rank, x, y) => {
    context.fillStyle = cssOf(inkOn(scene.colours[rank] ?? [128, 128, 128]));
    const lines = cardLines(picture, rank);
    const shown = most === 1 ? [lines.slice(0, MOST_IN_A_LINE).join(", ")] : lines.slice(0, most);
    shown.forEach((text, line) => {
      context.font = line === 0 && most > 1 ? `600 ${font}` : font;
      const fits = cutText(context, text, view.cell - 2 * CARD_PAD_PX);
      context.fillText(fits, x + CARD_PAD_PX, y + above + (line + 0.5) * high);
    });
    drawn += 1;
  });
  return drawn;
}

function cardLines(picture: GridPicture, rank: number): string[] {
  const operation = picture.operations[String(picture.operation[rank])];
  const step = picture.step[rank] ?? -1;
  const lines = [
    `rank ${rank}`,
    picture.states[picture.state[rank] ?? 0]?.name ?? "",
    picture.hosts[picture.host[rank] ?? 0] ?? "",
    step < 0 ? "" : `step ${step.toLocaleString("en-US")}`,
    operation === undefined ? "" : `last in ${operation}`,
  ];
  return lines.filter((text) => text !== "");
}

function paintHeads(context: CanvasRenderingContext2D, layout: Layout, view: GridView, size: Size, style: GridStyle): void {
  context.font = style.font;
  context.fillStyle = style.inkFaint;
  context.textBaseline = "middle";
  context.textAlign = "center";
  const stageWidth = layout.tp_size * view.cell;
  const every = Math.max(1, Math.ceil(40 / (stageWidth + view.cell)));
  for (let pp = 0; pp < layout.pp_size; pp += every) {
    const x = GRID_LEFT + leftOf(layout, view, { pp, tp: 0 }) + stageWidth / 2;
    if (x > GRID_LEFT && x < size.width) {
      context.fillText(`pp ${pp}`, x, GRID_TOP / 2);
    }
  }
  context.textAlign = "right";
  const step = Math.max(1, Math.ceil(16 / view.line));
  for (let dp = 0; dp < layout.dp_size; dp += step) {
    const y = GRID_TOP + view.y + (dp + 0.5) * view.line;
    if (y >= GRID_TOP && y < size.height) {
      context.fillText(`dp ${dp}`, GRID_LEFT - 8, y);
    }
  }
}
