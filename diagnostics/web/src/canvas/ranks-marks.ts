// Drawn on top of the grid's cells: outlines of peers, wait-for arrows, marks of suspects, the cursor.

import { cssOf, type Theme, type Triple } from "./colors.ts";
import { BEHIND, centerOf, hasCards, OUTLIER, SILENT, SUSPECT, type RanksPicture, type GridView } from "./ranks-picture.ts";
import { cutText } from "./text.ts";

const MOST_MARKS = 60;
const MOST_RADIUS_PX = 18;

export interface RanksStyle {
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

export interface RanksScene {
  picture: RanksPicture;
  colors: readonly Triple[];
  image: HTMLCanvasElement;
  hasArrows: boolean;
  cursor: number;
  peers: ReadonlySet<number>;
}

export function paintPeers(context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, style: RanksStyle): void {
  context.strokeStyle = style.accent;
  context.lineWidth = 1;
  const width = Math.max(2, view.cell - 1);
  const height = Math.max(2, view.line - 1);
  context.beginPath();
  for (const rank of scene.peers) {
    const { x, y } = centerOf(scene.picture.shape, view, rank);
    context.rect(x - width / 2, y - height / 2, width, height);
  }
  context.stroke();
}

export function paintArrows(context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, style: RanksStyle): number {
  const { picture } = scene;
  const count = picture.arrowKind.length;
  for (let arrow = 0; arrow < count; arrow += 1) {
    const from = centerOf(picture.shape, view, picture.arrows[2 * arrow] ?? 0);
    const to = centerOf(picture.shape, view, picture.arrows[2 * arrow + 1] ?? 0);
    const kind = picture.arrowKinds[picture.arrowKind[arrow] ?? 0];
    const isSuspect = kind === "suspect" || kind === "silent";
    context.strokeStyle = isSuspect ? style.bad : style.inkSoft;
    context.fillStyle = context.strokeStyle;
    context.globalAlpha = isSuspect ? 0.6 : 0.4;
    // the width grows with the number of waiting ranks, up to a limit
    context.lineWidth = Math.min(4, 0.75 + Math.log10(picture.arrowCount[arrow] ?? 1));
    context.setLineDash(isSuspect ? [] : [4, 3]);
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

/** Draw the number of waiting ranks at the start of an arrow. */
function paintCount(context: CanvasRenderingContext2D, count: number, x: number, y: number, style: RanksStyle): void {
  const text = `${count.toLocaleString("en-US")} waiting`;
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

/** Return the ranks to mark, the worst first: suspects, outliers, silent ranks, ranks that are behind. */
export function markedRanks(picture: RanksPicture): number[] {
  const found: number[] = [];
  for (const state of [SUSPECT, OUTLIER, SILENT, BEHIND]) {
    for (let rank = 0; rank < picture.numRanks && found.length < MOST_MARKS; rank += 1) {
      if (picture.state[rank] === state) {
        found.push(rank);
      }
    }
  }
  return found;
}

export function paintMarks(
  context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, width: number, height: number, style: RanksStyle,
): number {
  const { picture } = scene;
  context.font = style.font;
  context.textBaseline = "middle";
  let drawn = 0;
  const isCard = hasCards(view);
  const named: { x: number; y: number }[] = [];
  for (const rank of markedRanks(picture)) {
    const { x: middle, y } = centerOf(picture.shape, view, rank);
    const x = isCard ? middle + view.cell / 2 - MOST_RADIUS_PX - 6 : middle; // beside the text
    if (x < 0 || x > width || y < 0 || y > height) {
      continue;
    }
    const state = picture.state[rank] ?? 0;
    const diamond = Math.max(7, Math.min(MOST_RADIUS_PX, Math.min(view.cell, view.line) / 2 - 1));
    drawn += 1;
    if (state === SUSPECT) {
      paintDiamond(context, x, y, diamond, style);
    } else if (state === OUTLIER || state === SILENT) {
      const radius = Math.max(4, Math.min(view.cell, view.line, isCard ? MOST_RADIUS_PX : Infinity) / 2);
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
    const isFree = !isCard && named.every((one) => Math.abs(one.y - y) > 16 || Math.abs(one.x - x) > 110);
    if (state === SUSPECT && isFree) {
      named.push({ x, y });
      const text = `rank ${rank} ${picture.hosts[picture.host[rank] ?? 0] ?? ""}`.trim();
      paintTag(context, text, x, y, diamond + 5, width, style);
    }
  }
  return drawn;
}

function paintDiamond(context: CanvasRenderingContext2D, x: number, y: number, radius: number, style: RanksStyle): void {
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
  context: CanvasRenderingContext2D, text: string, x: number, y: number, aside: number, width: number, style: RanksStyle,
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

export function paintRanksCursor(context: CanvasRenderingContext2D, scene: RanksScene, view: GridView, style: RanksStyle): void {
  if (scene.cursor < 0 || scene.cursor >= scene.picture.numRanks) {
    return;
  }
  const { x, y } = centerOf(scene.picture.shape, view, scene.cursor);
  const width = Math.max(9, view.cell + 2);
  const height = Math.max(9, view.line + 2);
  context.lineWidth = 4;
  context.strokeStyle = cssOf(style.background);
  context.strokeRect(x - width / 2, y - height / 2, width, height);
  context.lineWidth = 2;
  context.strokeStyle = style.accent;
  context.strokeRect(x - width / 2, y - height / 2, width, height);
}
