// The input of drawing: the picture, its lines, a style, and the colors of the slices. It is computed when a selection changes,
// not in each frame.

import { mixed, operationColor, packed, type Theme, type Triple } from "./colors.ts";
import { HAS_FAILED, type IdealPicture, type Placement, type TimelinePicture } from "./timeline-picture.ts";

export const TIMELINE_FONT_PX = 12;

export interface TimelineStyle {
  theme: Theme;
  background: Triple;
  ink: string;
  inkSoft: string;
  inkFaint: string;
  line: string;
  lineStrong: string;
  accent: string;
  font: string;
}

/** The appearance of each slice. */
export interface TimelineColors {
  /** By slice, an index into `pixels`: the operation's number, plus 128 if the slice is pale. */
  color: Uint8Array;
  pale: Uint8Array;
  weight: Uint8Array;
  pixels: Uint32Array;
  edges: Uint32Array;
  ideals: Uint32Array;
  triples: Triple[];
}

const WEIGHT_PALE = 0;
const WEIGHT_BY_LANE: Record<string, number> = {
  host: 1, "data-loader": 1, pictures: 1, compute: 3, dp: 4, tp: 4, "pp-send": 5, "pp-recv": 5,
};
const WEIGHT_FAILED = 9;
const WEIGHT_CHOSEN = 12;

/** Return the colors of all slices; slices outside of `chosen` (a search, or the critical path) are pale. */
export function timelineColors(
  picture: TimelinePicture, chosen: Uint8Array | null, style: Pick<TimelineStyle, "theme" | "background">,
): TimelineColors {
  const triples = Array.from({ length: 128 }, (_, number) =>
    operationColor(picture.operations[String(number)] ?? "", style.theme),
  );
  const darker: Triple = style.theme === "dark" ? [0, 0, 0] : [20, 22, 28];
  const table = (change: (color: Triple) => Triple): Uint32Array => Uint32Array.from(triples, (one) => packed(change(one)));
  const pale = new Uint8Array(picture.numSlices);
  const color = new Uint8Array(picture.numSlices);
  const weight = new Uint8Array(picture.numSlices);
  for (let line = 0; line < picture.lineTrack.length; line += 1) {
    const lane = picture.lanes[picture.trackLane[picture.lineTrack[line] ?? 0] ?? 0] ?? "";
    const laneWeight = WEIGHT_BY_LANE[lane] ?? 2;
    const last = picture.lineFirst[line + 1] ?? 0;
    for (let slice = picture.lineFirst[line] ?? 0; slice < last; slice += 1) {
      const isPale = chosen !== null && chosen[slice] === 0;
      const hasFailed = ((picture.flags[slice] as number) & HAS_FAILED) !== 0;
      // the upper half of the color table holds the pale colors
      color[slice] = Math.min(picture.operation[slice] as number, 127) + (isPale ? 128 : 0);
      pale[slice] = isPale ? 1 : 0;
      weight[slice] = isPale ? WEIGHT_PALE : hasFailed ? WEIGHT_FAILED : chosen === null ? laneWeight : WEIGHT_CHOSEN;
    }
  }
  const plain = table((one) => one);
  const plainEdges = table((one) => mixed(one, darker, 0.35));
  const palePixels = table((one) => mixed(one, style.background, 0.78));
  const paleEdges = table((one) => mixed(one, style.background, 0.66));
  return {
    color,
    pale,
    weight,
    pixels: joined(plain, palePixels),
    edges: joined(plainEdges, paleEdges),
    ideals: joined(table((one) => mixed(one, style.background, 0.35)), palePixels),
    triples,
  };
}

function joined(first: Uint32Array, second: Uint32Array): Uint32Array {
  const both = new Uint32Array(first.length + second.length);
  both.set(first);
  both.set(second, first.length);
  return both;
}

export interface TimelineScene {
  picture: TimelinePicture;
  ideal: IdealPicture | null;
  placement: Placement;
  colors: TimelineColors;
  /** 1 for each slice on the critical path; null if the path is not shown. */
  critical: Uint8Array | null;
  hasFlows: boolean;
  cursor: number;
  rankLabels: ReadonlyMap<number, string>;
}
