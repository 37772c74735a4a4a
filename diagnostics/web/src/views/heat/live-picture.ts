// The picture of a heat map, kept up to date: at first all of it, later only the newest columns, which are joined to what is
// there. The old picture stays until the new one has come, so nothing flickers.

import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError, getArrays, type Query } from "../../api/client";
import { epoch, versions } from "../../api/live";
import { readArrays } from "../../canvas/arrays";
import { continued, heatPicture, type HeatPicture } from "../../canvas/heat-picture";
import { Refresher } from "../refresher";

export interface LivePicture {
  picture: HeatPicture | null;
  error: ApiError | null;
  reload: () => void;
}

const LEAST_PAUSE_MS = 1500;
// The newest columns may not have been complete: they are asked for again with those that are new.
const OVERLAP = 4;
// So often a picture is continued before all of it is asked for again: the ends of its colours may be out of date.
const MOST_JOINED = 40;
// What the server draws where no steps are named.
const MOST_COLUMNS = 1000;
const MOST_CELLS = 1_300_000;

function asApiError(error: unknown): ApiError {
  return error instanceof ApiError ? error : new ApiError(0, "unavailable", String(error));
}

async function wholePicture(query: Query, stop: AbortSignal): Promise<HeatPicture> {
  return heatPicture(readArrays(await getArrays("heat", query, stop)));
}

async function nextPicture(old: HeatPicture, query: Query, stop: AbortSignal): Promise<HeatPicture> {
  const first = Math.max(old.firstStep + 1, old.lastStep - OVERLAP + 1);
  const canContinue = query["sort"] !== "score" && query["first"] == null && query["last"] == null
    && old.stepsPerBin === 1 && old.numColumns > OVERLAP;
  if (canContinue) {
    const more = { ...query, first, low: old.low, high: old.high };
    const next = heatPicture(readArrays(await getArrays("heat", more, stop)));
    const { tp_size: tp, pp_size: pp, dp_size: dp } = old.layout;
    const most = Math.max(1, Math.min(MOST_COLUMNS, Math.floor(MOST_CELLS / (tp * pp * dp))));
    const joined = next.numColumns === 0 ? old : continued(old, next, most);
    if (joined !== null) {
      return joined;
    }
  }
  return wholePicture(query, stop);
}

/** Return the picture that a question is answered by. */
export function useLivePicture(query: Query): LivePicture {
  const key = JSON.stringify(query);
  const version = versions.value["heat"] ?? 0;
  const era = epoch.value;
  const [held, setHeld] = useState<{ key: string; picture: HeatPicture | null; error: ApiError | null }>({
    key: "", picture: null, error: null,
  });
  const [round, setRound] = useState(0);
  const refresher = useRef<Refresher | null>(null);

  useEffect(() => {
    let shown: HeatPicture | null = null;
    let numJoined = 0;
    const read = async (stop: AbortSignal): Promise<void> => {
      try {
        const isWhole: boolean = shown === null || numJoined >= MOST_JOINED;
        numJoined = isWhole ? 0 : numJoined + 1;
        shown = await (shown === null || isWhole ? wholePicture(query, stop) : nextPicture(shown, query, stop));
        setHeld({ key, picture: shown, error: null });
      } catch (error) {
        if (!stop.aborted) {
          setHeld((before) => ({ key, picture: before.key === key ? before.picture : null, error: asApiError(error) }));
        }
      }
    };
    const own = new Refresher(read, LEAST_PAUSE_MS);
    refresher.current = own;
    own.start();
    return () => own.stop();
    // the key stands for the question
  }, [key, era, round]);
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) {
      refresher.current?.news();
    }
    isFirst.current = false;
  }, [version]);

  return { picture: held.picture, error: held.error, reload: () => setRound((old) => old + 1) };
}
