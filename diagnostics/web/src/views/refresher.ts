// A picture that a view shows. The old picture stays until the new one arrives, so nothing flickers.

import { useState } from "preact/hooks";

import { asApiError, type ApiError } from "../api/client";
import { epoch, versions } from "../api/live";
import { useRefresher } from "../api/use_refresher";
import { rangeMoves } from "../app/range";

export interface Refreshed<T> {
  picture: T | null;
  error: ApiError | null;
  reload: () => void;
}

/** Reads a picture once; `before` is its previous result, null at first. */
export type ReadPicture<T> = (before: T | null, stop: AbortSignal) => Promise<T>;

/**
 * Return a picture that is read again whenever `key`, which identifies the query, or the version of `topic` changes. `begin` is
 * called once per query and returns the function that reads.
 */
export function useRefreshed<T>(topic: string, key: string, leastPauseMs: number, begin: () => ReadPicture<T>): Refreshed<T> {
  const [held, setHeld] = useState<{ key: string; picture: T | null; error: ApiError | null }>({
    key: "", picture: null, error: null,
  });
  const [round, setRound] = useState(0);
  useRefresher(`${epoch.value} ${round} ${key}`, `${versions.value[topic] ?? 0} ${rangeMoves.value}`, leastPauseMs, () => {
    const readPicture = begin();
    let shown: T | null = null;
    return async (stop) => {
      try {
        shown = await readPicture(shown, stop);
        setHeld({ key, picture: shown, error: null });
      } catch (error) {
        if (!stop.aborted) {
          setHeld((before) => ({ key, picture: before.key === key ? before.picture : null, error: asApiError(error) }));
        }
      }
    };
  });
  return { picture: held.picture, error: held.error, reload: () => setRound((old) => old + 1) };
}
