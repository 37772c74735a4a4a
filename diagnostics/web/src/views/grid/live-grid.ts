// The grid, asked for again when there is news of it. The old picture stays until the new one has come.

import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError, getArrays } from "../../api/client";
import { epoch, versions } from "../../api/live";
import { readArrays } from "../../canvas/arrays";
import { gridPicture, type GridPicture } from "../../canvas/grid-picture";
import { Refresher } from "../refresher";

export interface LiveGrid {
  picture: GridPicture | null;
  error: ApiError | null;
  reload: () => void;
}

const LEAST_PAUSE_MS = 1000;

export function useLiveGrid(incarnation: number | undefined): LiveGrid {
  const version = versions.value["grid"] ?? 0;
  const era = epoch.value;
  const [round, setRound] = useState(0);
  const [held, setHeld] = useState<{ picture: GridPicture | null; error: ApiError | null }>({ picture: null, error: null });
  const refresher = useRef<Refresher | null>(null);
  useEffect(() => {
    const read = async (stop: AbortSignal): Promise<void> => {
      try {
        setHeld({ picture: gridPicture(readArrays(await getArrays("grid", { incarnation }, stop))), error: null });
      } catch (error) {
        if (!stop.aborted) {
          const told = error instanceof ApiError ? error : new ApiError(0, "unavailable", String(error));
          setHeld((old) => ({ picture: old.picture?.incarnation === incarnation ? old.picture : null, error: told }));
        }
      }
    };
    const own = new Refresher(read, LEAST_PAUSE_MS);
    refresher.current = own;
    own.start();
    return () => own.stop();
  }, [incarnation, era, round]);
  const isFirst = useRef(true);
  useEffect(() => {
    if (!isFirst.current) {
      refresher.current?.news();
    }
    isFirst.current = false;
  }, [version]);
  return { ...held, reload: () => setRound((old) => old + 1) };
}
