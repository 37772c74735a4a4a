// Draws the grid: an image of one pixel per rank, scaled to cells, then letters and marks. Suspects are marked with a shape and
// a name at any zoom; the color is redundant.

import { againstPeers, cssOf, inkOn, operationColor, packed, sequential, type Theme, type Triple } from "./colors.ts";
import { paintArrows, paintRanksCursor, paintMarks, paintPeers, type RanksScene, type RanksStyle } from "./ranks-marks.ts";
import {
  hasCards, leftOf, placeOfRank, rankOfPlace, UNKNOWN, type RanksPicture, type GridShape, type GridView,
} from "./ranks-picture.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";

export type RanksColor = "state" | "step" | "operation" | "score";

export const RANKS_TOP = 24;
export const RANKS_LEFT = 54;
export const RANKS_FONT_PX = 12;
const LETTER_PX = 13;
/** Cells of at least this size also show the number of the rank, at this distance from the top. */
const NUMBERED_PX = 60;
const NUMBER_TOP_PX = 12;
/** Smaller cells of at least this width show the number before the letter. */
const NUMBERED_WIDE_PX = 48;
/** Scores of this value and more have the last color. */
const TOP_SCORE = 6;

const STATE_COLORS: Record<Theme, readonly Triple[]> = {
  light: [[226, 226, 222], [183, 203, 232], [236, 200, 120], [201, 184, 222], [120, 124, 130], [224, 140, 70], [190, 40, 34]],
  dark: [[44, 46, 51], [54, 86, 132], [150, 112, 34], [96, 78, 128], [150, 155, 162], [206, 120, 48], [255, 120, 110]],
};

/** Return the color of a state, given its number. */
export function stateColor(state: number, theme: Theme): Triple {
  return STATE_COLORS[theme][state] ?? [128, 128, 128];
}

/** Return the color of each rank. */
export function rankColors(picture: RanksPicture, by: RanksColor, theme: Theme): Triple[] {
  const least = by === "step" ? leastStep(picture) : 0;
  const width = Math.max(1, picture.newestStep - least);
  const unknown = stateColor(UNKNOWN, theme);
  return Array.from({ length: picture.numRanks }, (_, rank) => {
    if (by === "operation") {
      const name = picture.operations[String(picture.operation[rank])];
      return name === undefined ? unknown : operationColor(name, theme);
    }
    if (by === "step") {
      const step = picture.step[rank] ?? -1;
      return step < 0 ? unknown : rangeColor(by, (step - least) / width, theme);
    }
    if (by === "score") {
      const score = picture.score[rank] ?? Number.NaN;
      return Number.isNaN(score) ? unknown : rangeColor(by, Math.max(0, score) / TOP_SCORE, theme);
    }
    return stateColor(picture.state[rank] ?? UNKNOWN, theme);
  });
}

/** Return the lowest step that any rank has reported. */
export function leastStep(picture: RanksPicture): number {
  let least = picture.newestStep;
  for (const step of picture.step) {
    if (step >= 0 && step < least) {
      least = step;
    }
  }
  return least;
}

/** Return the color at a position (0 to 1) of the range of steps or scores. */
function rangeColor(by: "step" | "score", part: number, theme: Theme): Triple {
  return by === "step" ? sequential(part) : againstPeers(part, theme);
}

/** Return the least, middle and greatest value of the range of steps or scores with their colors, for the legend. */
export function rangeStops(
  picture: RanksPicture, by: "step" | "score", theme: Theme,
): { value: number; color: Triple }[] {
  const [least, most] = by === "step" ? [leastStep(picture), picture.newestStep] : [0, TOP_SCORE];
  const parts = most > least ? [0, 0.5, 1] : [0];
  return parts.map((part) => ({ value: least + (most - least) * part, color: rangeColor(by, part, theme) }));
}

/** Return the grid as an image of one pixel per rank, with the stages side by side. */
export function ranksImage(shape: GridShape, colors: readonly Triple[]): { pixels: Uint32Array; width: number; height: number } {
  const width = shape.stages * shape.inner;
  const pixels = new Uint32Array(width * shape.replicas);
  colors.forEach((color, rank) => {
    const place = placeOfRank(shape, rank);
    pixels[place.replica * width + place.stage * shape.inner + place.inner] = packed(color);
  });
  return { pixels, width, height: shape.replicas };
}

export interface RanksPainted {
  numArrows: number;
  numLetters: number;
  numCards: number;
  numMarks: number;
}

export function paintRanksPicture(
  context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, size: Size, style: RanksStyle,
): RanksPainted {
  const { picture } = scene;
  const { shape } = picture;
  context.clearRect(0, 0, size.width, size.height);
  const width = size.width - RANKS_LEFT;
  const height = size.height - RANKS_TOP;
  context.save();
  context.beginPath();
  context.rect(RANKS_LEFT, RANKS_TOP, width, height);
  context.clip();
  context.translate(RANKS_LEFT, RANKS_TOP);
  context.imageSmoothingEnabled = false;
  const across = shape.inner * view.cell;
  for (let stage = 0; stage < shape.stages; stage += 1) {
    const from = stage * shape.inner;
    const left = leftOf(shape, view, { stage, inner: 0 });
    context.drawImage(
      scene.image, from, 0, shape.inner, shape.replicas, left, view.y, across, shape.replicas * view.line,
    );
  }
  paintGaps(context, shape, view, width, height, style);
  const numCards = hasCards(view) ? paintCards(context, scene, view, width, height, style) : 0;
  const numLetters = numCards === 0 ? paintLetters(context, scene, view, width, height, style) : 0;
  paintPeers(context, scene, view, style);
  const numArrows = scene.hasArrows ? paintArrows(context, scene, view, style) : 0;
  const numMarks = paintMarks(context, scene, view, width, height, style);
  paintRanksCursor(context, scene, view, style);
  context.restore();
  paintHeads(context, shape, view, size, style);
  return { numArrows, numLetters, numCards, numMarks };
}

const LEAST_GAP_PX = 6;

function paintGaps(
  context: CanvasRenderingContext2D, shape: GridShape, view: GridView, width: number, height: number, style: RanksStyle,
): void {
  context.fillStyle = cssOf(style.background);
  const down = Math.min(height, view.y + shape.replicas * view.line);
  const top = Math.max(0, view.y);
  if (view.cell >= LEAST_GAP_PX) {
    for (let column = 0; column < shape.stages * shape.inner; column += 1) {
      const x = leftOf(shape, view, { stage: Math.floor(column / shape.inner), inner: column % shape.inner });
      if (x > -view.cell && x < width) {
        context.fillRect(x, top, 1, down - top);
      }
    }
  }
  if (view.line >= LEAST_GAP_PX) {
    for (let replica = 0; replica <= shape.replicas; replica += 1) {
      const y = view.y + replica * view.line;
      if (y >= 0 && y < height) {
        context.fillRect(0, y, width, 1);
      }
    }
  }
}

function eachInSight(
  shape: GridShape, view: GridView, width: number, height: number, visit: (rank: number, x: number, y: number) => void,
): void {
  const first = Math.max(0, Math.floor(-view.y / view.line));
  const last = Math.min(shape.replicas, Math.ceil((height - view.y) / view.line));
  for (let replica = first; replica < last; replica += 1) {
    for (let stage = 0; stage < shape.stages; stage += 1) {
      for (let inner = 0; inner < shape.inner; inner += 1) {
        const x = leftOf(shape, view, { stage, inner });
        if (x > -view.cell && x < width) {
          visit(rankOfPlace(shape, { stage, replica, inner }), x, view.y + replica * view.line);
        }
      }
    }
  }
}

function paintLetters(
  context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, width: number, height: number, style: RanksStyle,
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
  eachInSight(picture.shape, view, width, height, (rank, x, y) => {
    const letter = picture.states[picture.state[rank] ?? 0]?.letter ?? "";
    context.fillStyle = cssOf(inkOn(scene.colors[rank] ?? [128, 128, 128]));
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
/** A card of one line shows three facts: rank, state and host. */
const MOST_IN_A_LINE = 3;

/** Draw the facts about each rank as text in its cell. */
function paintCards(
  context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, width: number, height: number, style: RanksStyle,
): number {
  const { picture } = scene;
  context.textAlign = "left";
  context.textBaseline = "middle";
  const scale = Number.parseFloat(style.font) / RANKS_FONT_PX; // follows the text size of the page
  const font = style.font.replace(/^[\d.]+px/, `${CARD_FONT_PX * scale}px`);
  const high = Math.min(CARD_LINE_PX * scale, view.line);
  const most = Math.max(1, Math.floor((view.line - CARD_PAD_PX) / high));
  const above = Math.min(CARD_PAD_PX, (view.line - most * high) / 2);
  let drawn = 0;
  eachInSight(picture.shape, view, width, height, (rank, x, y) => {
    context.fillStyle = cssOf(inkOn(scene.colors[rank] ?? [128, 128, 128]));
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

function cardLines(picture: RanksPicture, rank: number): string[] {
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

function paintHeads(context: CanvasRenderingContext2D, shape: GridShape, view: GridView, size: Size, style: RanksStyle): void {
  context.font = style.font;
  context.fillStyle = style.inkFaint;
  context.textBaseline = "middle";
  context.textAlign = "center";
  const stageWidth = shape.inner * view.cell;
  const every = Math.max(1, Math.ceil(40 / (stageWidth + view.cell)));
  for (let stage = 0; stage < shape.stages; stage += every) {
    const x = RANKS_LEFT + leftOf(shape, view, { stage, inner: 0 }) + stageWidth / 2;
    if (x > RANKS_LEFT && x < size.width) {
      context.fillText(`pp ${stage}`, x, RANKS_TOP / 2);
    }
  }
  context.textAlign = "right";
  const step = Math.max(1, Math.ceil(16 / view.line));
  for (let replica = 0; replica < shape.replicas; replica += step) {
    const y = RANKS_TOP + view.y + (replica + 0.5) * view.line;
    if (y >= RANKS_TOP && y < size.height) {
      context.fillText(`dp ${replica}`, RANKS_LEFT - 8, y);
    }
  }
}
