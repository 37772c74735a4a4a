// The picture of a heat map, kept up to date: it is read completely once, then only the newest columns are read and appended.

import { getArrays, type Query } from "../../api/client";
import { readArrays } from "../../canvas/arrays";
import { isWholeRun } from "../../app/range";
import { continued, heatPicture, type HeatPicture } from "../../canvas/heat-picture";
import { useRefreshed, type ReadPicture, type Refreshed } from "../refresher";

const LEAST_PAUSE_MS = 1500;
// The newest columns may have been incomplete, so they are read again together with the new ones.
const OVERLAP = 4;
// After this many updates the whole picture is read again, because the limits of its color scale may be out of date.
const MOST_JOINED = 40;
// The server's limit of columns for a request without steps.
const MOST_COLUMNS = 1000;
const MOST_CELLS = 1_300_000;

async function wholePicture(query: Query, stop: AbortSignal): Promise<HeatPicture> {
  return heatPicture(readArrays(await getArrays("heat", query, stop)));
}

async function nextPicture(old: HeatPicture, query: Query, stop: AbortSignal): Promise<HeatPicture> {
  const first = Math.max(old.firstStep + 1, old.lastStep - OVERLAP + 1);
  const canContinue = query["sort"] !== "score" && query["first"] == null && query["last"] == null
    && isWholeRun.value && old.stepsPerBin === 1 && old.numColumns > OVERLAP;
  if (canContinue) {
    const more = { ...query, first, low: old.low, high: old.high };
    const next = heatPicture(readArrays(await getArrays("heat", more, stop)));
    const most = Math.max(1, Math.min(MOST_COLUMNS, Math.floor(MOST_CELLS / old.layout.world_size)));
    const joined = next.numColumns === 0 ? old : continued(old, next, most);
    if (joined !== null) {
      return joined;
    }
  }
  return wholePicture(query, stop);
}

function reading(query: Query): ReadPicture<HeatPicture> {
  let numJoined = 0;
  return async (before, stop) => {
    const isWhole = before === null || numJoined >= MOST_JOINED;
    numJoined = isWhole ? 0 : numJoined + 1;
    return isWhole ? wholePicture(query, stop) : nextPicture(before, query, stop);
  };
}

/** Return the picture for a query. */
export function useLivePicture(query: Query): Refreshed<HeatPicture> {
  return useRefreshed("heat", JSON.stringify(query), LEAST_PAUSE_MS, () => reading(query));
}
