// The scene of the timeline's canvas, computed only when a selection changes.

import { useMemo } from "preact/hooks";

import { shownTheme, token } from "../../app/preferences";
import { tripleOfHex } from "../../canvas/colors";
import { fontOf } from "../../canvas/surface";
import { linesWithIdeal, placeLines, type IdealPicture, type TimelinePicture } from "../../canvas/timeline-picture";
import { timelineColors, TIMELINE_FONT_PX, type TimelineScene, type TimelineStyle } from "../../canvas/timeline-scene";
import { rankText } from "./details";

export function timelineStyle(element: HTMLElement): TimelineStyle {
  return {
    theme: shownTheme.peek(),
    background: tripleOfHex(token("--surface")),
    ink: token("--ink"),
    inkSoft: token("--ink-soft"),
    inkFaint: token("--ink-faint"),
    line: token("--line"),
    lineStrong: token("--line-strong"),
    accent: token("--accent"),
    font: fontOf(element, TIMELINE_FONT_PX, TIMELINE_FONT_PX),
  };
}

interface Choice {
  picture: TimelinePicture;
  ideal: IdealPicture | null;
  hasIdeal: boolean;
  hasCritical: boolean;
  hasFlows: boolean;
  /** 1 for each slice that matches the search; null: no search. */
  found: Uint8Array | null;
  cursor: number;
}

export function useScene({ picture, ideal, hasIdeal, hasCritical, hasFlows, found, cursor }: Choice): TimelineScene {
  const theme = shownTheme.value;
  const known = ideal !== null && ideal.idealS !== null && ideal.begin.length === picture.numSlices ? ideal : null;
  const shownIdeal = hasIdeal ? known : null;
  const critical = hasCritical && known !== null ? known.isCritical : null;
  const placement = useMemo(() => {
    const has = shownIdeal === null ? null : linesWithIdeal(picture, shownIdeal);
    return placeLines(picture, (line) => has !== null && has[line] === 1);
  }, [picture, shownIdeal]);
  const chosen = found ?? critical;
  const colors = useMemo(
    () => timelineColors(picture, chosen, { theme, background: tripleOfHex(token("--surface")) }),
    [picture, chosen, theme],
  );
  const rankLabels = useMemo(() => new Map([...picture.rank].map((rank) => [rank, rankText(picture, rank)])), [picture]);
  return useMemo(
    () => ({ picture, ideal: shownIdeal, placement, colors, critical, hasFlows, cursor, rankLabels }),
    [picture, shownIdeal, placement, colors, critical, hasFlows, cursor, rankLabels],
  );
}
