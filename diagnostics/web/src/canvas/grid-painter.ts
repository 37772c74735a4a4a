// The 3D grid on its canvas: a pixel a rank, stretched to cells, then letters, arrows and marks. Who is to blame is a shape
// with a name beside it, at any size; colour only repeats it.

import { cssOf, inkOn, operationColour, packed, sequential, type Theme, type Triple } from "./colours.ts";
import {
  BEHIND, centreOf, columnOfPlace, numGridColumns, OUTLIER, placeOfRank, SILENT, SUSPECT, UNHEARD, type GridPicture,
  type GridView,
} from "./grid-picture.ts";
import type { Layout } from "./heat-picture.ts";
import type { Size } from "./surface.ts";
import { cutText } from "./text.ts";

export type GridColour = "state" | "step" | "operation" | "score";

export interface GridStyle {
  theme: Theme;
  background: Triple;
  ink: string;
  inkSoft: string;
  inkFaint: string;
  line: string;
  accent: string;
  bad: string;
  badInk: string;
  mark: string;
  font: string;
}

export const GRID_TOP = 24;
export const GRID_LEFT = 54;
export const GRID_FONT_PX = 12;
const LETTER_PX = 13;
const MOST_MARKS = 60;
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
      return Number.isNaN(score) ? unknown : sequential(Math.max(0, score) / TOP_SCORE);
    }
    return stateColour(picture.state[rank] ?? UNHEARD, theme);
  });
}

/** Return the least step that a rank has told of. */
export function leastStep(picture: GridPicture): number {
  let least = picture.newestStep;
  for (const step of picture.step) {
    if (step >= 0 && step < least) {
      least = step;
    }
  }
  return least;
}

/** Return the grid as an image of one pixel a rank; between stages it is clear. */
export function gridImage(layout: Layout, colours: readonly Triple[]): { pixels: Uint32Array; width: number; height: number } {
  const width = numGridColumns(layout);
  const pixels = new Uint32Array(width * layout.dp_size);
  colours.forEach((colour, rank) => {
    const place = placeOfRank(layout, rank);
    pixels[place.dp * width + columnOfPlace(layout, place)] = packed(colour);
  });
  return { pixels, width, height: layout.dp_size };
}

export interface GridScene {
  picture: GridPicture;
  colours: readonly Triple[];
  image: HTMLCanvasElement;
  hasArrows: boolean;
  cursor: number;
  peers: ReadonlySet<number>;
}

export interface GridPainted {
  numArrows: number;
  numLetters: number;
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
  const across = numGridColumns(layout) * view.cell;
  context.drawImage(scene.image, view.x, view.y, across, layout.dp_size * view.line);
  paintGaps(context, layout, view, width, height, style);
  const numLetters = paintLetters(context, scene, view, width, height, style);
  paintPeers(context, scene, view, style);
  const numArrows = scene.hasArrows ? paintArrows(context, scene, view, style) : 0;
  const numMarks = paintMarks(context, scene, view, width, height, style);
  paintGridCursor(context, scene, view, style);
  context.restore();
  paintHeads(context, layout, view, size, style);
  return { numArrows, numLetters, numMarks };
}

const LEAST_GAP_PX = 6;

function paintGaps(
  context: CanvasRenderingContext2D, layout: Layout, view: GridView, width: number, height: number, style: GridStyle,
): void {
  context.fillStyle = cssOf(style.background);
  const down = Math.min(height, view.y + layout.dp_size * view.line);
  const top = Math.max(0, view.y);
  if (view.cell >= LEAST_GAP_PX) {
    for (let column = 0; column < numGridColumns(layout); column += 1) {
      const x = view.x + column * view.cell;
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
        const x = view.x + columnOfPlace(layout, { dp, pp, tp }) * view.cell;
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
  let drawn = 0;
  eachInSight(picture.layout, view, width, height, (rank, x, y) => {
    const letter = picture.states[picture.state[rank] ?? 0]?.letter ?? "";
    context.fillStyle = cssOf(inkOn(scene.colours[rank] ?? [128, 128, 128]));
    context.fillText(letter, x + view.cell / 2, y + view.line / 2);
    drawn += 1;
  });
  return drawn;
}

function paintPeers(context: CanvasRenderingContext2D, scene: GridScene, view: GridView, style: GridStyle): void {
  context.strokeStyle = style.accent;
  context.lineWidth = 1;
  const width = Math.max(2, view.cell - 1);
  const height = Math.max(2, view.line - 1);
  context.beginPath();
  for (const rank of scene.peers) {
    const { x, y } = centreOf(scene.picture.layout, view, rank);
    context.rect(x - width / 2, y - height / 2, width, height);
  }
  context.stroke();
}

function paintArrows(context: CanvasRenderingContext2D, scene: GridScene, view: GridView, style: GridStyle): number {
  const { picture } = scene;
  const count = picture.arrowKind.length;
  for (let arrow = 0; arrow < count; arrow += 1) {
    const from = centreOf(picture.layout, view, picture.arrows[2 * arrow] ?? 0);
    const to = centreOf(picture.layout, view, picture.arrows[2 * arrow + 1] ?? 0);
    const kind = picture.arrowKinds[picture.arrowKind[arrow] ?? 0];
    const isBlamed = kind === "suspect" || kind === "silent";
    context.strokeStyle = isBlamed ? style.bad : style.inkSoft;
    context.fillStyle = context.strokeStyle;
    context.globalAlpha = isBlamed ? 0.6 : 0.4;
    // as many as wait, but never a beam
    context.lineWidth = Math.min(4, 0.75 + Math.log10(picture.arrowCount[arrow] ?? 1));
    context.setLineDash(isBlamed ? [] : [4, 3]);
    arrowLine(context, from.x, from.y, to.x, to.y);
    const waiting = picture.arrowCount[arrow] ?? 1;
    if (waiting > 1) {
      context.globalAlpha = 1;
      paintCount(context, waiting, from.x, from.y, style);
    }
  }
  context.setLineDash([]);
  context.globalAlpha = 1;
  return count;
}

/** How many ranks an arrow stands for, at its begin. */
function paintCount(context: CanvasRenderingContext2D, count: number, x: number, y: number, style: GridStyle): void {
  const text = `${count.toLocaleString("en-US")} wait`;
  context.font = style.font;
  context.textAlign = "left";
  context.textBaseline = "middle";
  const width = context.measureText(text).width + 6;
  context.fillStyle = cssOf(style.background, 0.88);
  context.fillRect(x - 3, y + 3, width, 15);
  context.fillStyle = style.ink;
  context.fillText(text, x, y + 11);
}

function arrowLine(context: CanvasRenderingContext2D, x0: number, y0: number, x1: number, y1: number): void {
  const length = Math.hypot(x1 - x0, y1 - y0);
  if (length < 2) {
    return;
  }
  const bend = Math.min(40, length / 6);
  const middleX = (x0 + x1) / 2 - ((y1 - y0) / length) * bend;
  const middleY = (y0 + y1) / 2 + ((x1 - x0) / length) * bend;
  context.beginPath();
  context.moveTo(x0, y0);
  context.quadraticCurveTo(middleX, middleY, x1, y1);
  context.stroke();
  const angle = Math.atan2(y1 - middleY, x1 - middleX);
  context.beginPath();
  context.moveTo(x1, y1);
  context.lineTo(x1 - 9 * Math.cos(angle - 0.35), y1 - 9 * Math.sin(angle - 0.35));
  context.lineTo(x1 - 9 * Math.cos(angle + 0.35), y1 - 9 * Math.sin(angle + 0.35));
  context.fill();
}

/** Return the ranks that are marked, the worst first: suspects, outliers, silent ones, those behind. */
export function markedRanks(picture: GridPicture): number[] {
  const found: number[] = [];
  for (const wanted of [SUSPECT, OUTLIER, SILENT, BEHIND]) {
    for (let rank = 0; rank < picture.numRanks && found.length < MOST_MARKS; rank += 1) {
      if (picture.state[rank] === wanted) {
        found.push(rank);
      }
    }
  }
  return found;
}

function paintMarks(
  context: CanvasRenderingContext2D, scene: GridScene, view: GridView, width: number, height: number, style: GridStyle,
): number {
  const { picture } = scene;
  context.font = style.font;
  context.textBaseline = "middle";
  let drawn = 0;
  const named: { x: number; y: number }[] = [];
  for (const rank of markedRanks(picture)) {
    const { x, y } = centreOf(picture.layout, view, rank);
    if (x < 0 || x > width || y < 0 || y > height) {
      continue;
    }
    const state = picture.state[rank] ?? 0;
    const diamond = Math.max(7, Math.min(18, Math.min(view.cell, view.line) / 2 - 1));
    drawn += 1;
    if (state === SUSPECT) {
      paintDiamond(context, x, y, diamond, style);
    } else if (state === OUTLIER || state === SILENT) {
      const radius = Math.max(4, Math.min(view.cell, view.line) / 2);
      context.strokeStyle = style.ink;
      context.lineWidth = 1.5;
      context.beginPath();
      if (state === OUTLIER) {
        context.arc(x, y, radius, 0, 2 * Math.PI);
      } else {
        context.rect(x - radius, y - radius, 2 * radius, 2 * radius);
      }
      context.stroke();
    }
    const isFree = named.every((one) => Math.abs(one.y - y) > 16 || Math.abs(one.x - x) > 110);
    if (state === SUSPECT && isFree) {
      named.push({ x, y });
      const text = `rank ${rank} ${picture.hosts[picture.host[rank] ?? 0] ?? ""}`.trim();
      paintTag(context, text, x, y, diamond + 5, width, style);
    }
  }
  return drawn;
}

function paintDiamond(context: CanvasRenderingContext2D, x: number, y: number, radius: number, style: GridStyle): void {
  context.beginPath();
  context.moveTo(x, y - radius);
  context.lineTo(x + radius, y);
  context.lineTo(x, y + radius);
  context.lineTo(x - radius, y);
  context.closePath();
  context.fillStyle = style.bad;
  context.fill();
  context.strokeStyle = cssOf(style.background);
  context.lineWidth = 2;
  context.stroke();
  context.fillStyle = style.badInk;
  context.textAlign = "center";
  context.fillText("X", x, y + 0.5);
}

function paintTag(
  context: CanvasRenderingContext2D, text: string, x: number, y: number, aside: number, width: number, style: GridStyle,
): void {
  const fits = cutText(context, text, 170);
  const size = context.measureText(fits).width + 10;
  const left = x + aside + size > width ? x - aside - size : x + aside;
  context.fillStyle = cssOf(style.background, 0.94);
  context.fillRect(left, y - 9, size, 18);
  context.strokeStyle = style.bad;
  context.lineWidth = 1;
  context.strokeRect(left + 0.5, y - 8.5, size - 1, 17);
  context.fillStyle = style.ink;
  context.textAlign = "left";
  context.fillText(fits, left + 5, y + 0.5);
}

function paintGridCursor(context: CanvasRenderingContext2D, scene: GridScene, view: GridView, style: GridStyle): void {
  if (scene.cursor < 0 || scene.cursor >= scene.picture.numRanks) {
    return;
  }
  const { x, y } = centreOf(scene.picture.layout, view, scene.cursor);
  const width = Math.max(9, view.cell + 2);
  const height = Math.max(9, view.line + 2);
  context.lineWidth = 4;
  context.strokeStyle = cssOf(style.background);
  context.strokeRect(x - width / 2, y - height / 2, width, height);
  context.lineWidth = 2;
  context.strokeStyle = style.accent;
  context.strokeRect(x - width / 2, y - height / 2, width, height);
}

function paintHeads(context: CanvasRenderingContext2D, layout: Layout, view: GridView, size: Size, style: GridStyle): void {
  context.font = style.font;
  context.fillStyle = style.inkFaint;
  context.textBaseline = "middle";
  context.textAlign = "center";
  const stageWidth = layout.tp_size * view.cell;
  const every = Math.max(1, Math.ceil(40 / (stageWidth + view.cell)));
  for (let pp = 0; pp < layout.pp_size; pp += every) {
    const x = GRID_LEFT + view.x + columnOfPlace(layout, { dp: 0, pp, tp: 0 }) * view.cell + stageWidth / 2;
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
