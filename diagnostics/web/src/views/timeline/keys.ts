// Keys on the timeline: arrows select the next slice, or move the view with Shift; plus and minus zoom.

import type { Camera } from "../../canvas/timeline-camera";
import { lineOfSlice, sliceAt, type TimelinePicture } from "../../canvas/timeline-picture";

const KEY_ZOOM = 0.6;
const KEY_PAN = 0.1;
const KEY_SCROLL_PX = 48;
const PAGE = 0.9;

/** Return the next slice of a line, or the one at the same time on the next line. */
export function neighbor(picture: TimelinePicture, slice: number, key: string): number {
  const line = lineOfSlice(picture, slice);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    const next = slice + (key === "ArrowLeft" ? -1 : 1);
    return next >= (picture.lineFirst[line] ?? 0) && next < (picture.lineFirst[line + 1] ?? 0) ? next : slice;
  }
  const middle = (picture.begin[slice] ?? 0) + (picture.length[slice] ?? 0) / 2;
  const towards = key === "ArrowUp" ? -1 : 1;
  for (let other = line + towards; other >= 0 && other < picture.lineTrack.length; other += towards) {
    const at = sliceAt(picture, other, middle, Infinity);
    if (at >= 0) {
      return at;
    }
  }
  return slice;
}

/** Move the view for a key; returns whether the key has such a function. */
export function moveByKey(camera: Camera, key: string, isShift: boolean, aroundNs: number): boolean {
  const moves: Record<string, () => void> = {
    "+": () => camera.zoom(KEY_ZOOM, aroundNs),
    "=": () => camera.zoom(KEY_ZOOM, aroundNs),
    "-": () => camera.zoom(1 / KEY_ZOOM, aroundNs),
    "0": () => camera.showAll(),
    "Home": () => camera.goToEnd(false),
    "End": () => camera.goToEnd(true),
    "PageUp": () => camera.scrollPage(-PAGE),
    "PageDown": () => camera.scrollPage(PAGE),
  };
  const withShift: Record<string, () => void> = {
    "ArrowLeft": () => camera.pan(-KEY_PAN),
    "ArrowRight": () => camera.pan(KEY_PAN),
    "ArrowUp": () => camera.scrollTo(camera.scroll - KEY_SCROLL_PX),
    "ArrowDown": () => camera.scrollTo(camera.scroll + KEY_SCROLL_PX),
  };
  const move = moves[key] ?? (isShift ? withShift[key] : undefined);
  move?.();
  return move !== undefined;
}
