// What stands below the columns: their steps, or when these ended where charts go over time.

import { useMemo } from "preact/hooks";

import type { SeriesDocument } from "../../api/documents";
import { useResource } from "../../api/resource";
import { clock } from "../../app/preferences";
import { axis } from "../../app/range";
import type { HeatPicture } from "../../canvas/heat-picture";
import { endOfStep } from "../../ui/chart-scale";
import { timeText } from "../../ui/format";

const POINTS = 200;

/** Return the text of a step; over time it is told as soon as the times are known. */
export function useStepText(picture: HeatPicture): (step: number) => string {
  const isTime = axis.value === "time";
  const zone = clock.value;
  const asked = { round: picture.round, from: picture.firstStep, to: picture.lastStep, points: POINTS };
  const series = useResource<SeriesDocument>(isTime ? "series" : null, asked).data;
  return useMemo(() => {
    if (!isTime || series === null) {
      return String;
    }
    return (step) => {
      const at = endOfStep(series, step);
      return at === null ? String(step) : timeText(at, zone, at); // without its day: the head of the view has that
    };
  }, [series, isTime, zone]);
}
