// The picture of all ranks, read again when the server reports a change.

import { getArrays } from "../../api/client";
import { readArrays } from "../../canvas/arrays";
import { ranksPicture, type RanksPicture } from "../../canvas/ranks-picture";
import { useRefreshed, type Refreshed } from "../refresher";

const LEAST_PAUSE_MS = 1000;

export function useLiveRanks(round: number | undefined): Refreshed<RanksPicture> {
  return useRefreshed("ranks", String(round), LEAST_PAUSE_MS, () => async (_, stop) =>
    ranksPicture(readArrays(await getArrays("grid", { round }, stop))),
  );
}
