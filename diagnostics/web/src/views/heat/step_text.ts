// The labels of columns: their steps, or the end times of the steps on a time axis.

import { useMemo } from "preact/hooks";

import type { SeriesDocument } from "../../api/documents";
import { useResource } from "../../api/resource";
import { clock } from "../../app/preferences";
import { axis } from "../../app/range";
import type { HeatPicture } from "../../canvas/heat-picture";
import { endOfStep } from "../../ui/chart-scale";
import { timeText } from "../../ui/format";

const POINTS = 200;

/** Return a function that labels a step; on a time axis it returns the step until the times are loaded. */
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
      return at === null ? String(step) : timeText(at, zone, at); // relative to its own day, so without a date
    };
  }, [series, isTime, zone]);
}
