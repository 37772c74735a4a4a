// The grid, read again when the server reports a change.

import { getArrays } from "../../api/client";
import { readArrays } from "../../canvas/arrays";
import { gridPicture, type GridPicture } from "../../canvas/grid-picture";
import { useRefreshed, type Refreshed } from "../refresher";

const LEAST_PAUSE_MS = 1000;

export function useLiveGrid(round: number | undefined): Refreshed<GridPicture> {
  return useRefreshed("grid", String(round), LEAST_PAUSE_MS, () => async (_, stop) =>
    gridPicture(readArrays(await getArrays("grid", { round }, stop))),
  );
}
